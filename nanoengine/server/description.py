"""/openapi.json: what may be asked, what may come back. The routes themselves read bodies by ``params.parse``."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from nanoengine.sampling_params import SEED_LIMIT
from nanoengine.server.errors import KINDS
from nanoengine.server.limits import PROTECTED
from nanoengine.server.params import MAX_BAD_WORDS, MAX_STOP_LENGTH, MAX_STOPS
from nanoengine.server.protocol import NEUTRAL, ChatRequest, CompletionRequest

REFS = "#/components/schemas/{model}"
ANYWHERE = (400, 408, 413)  # what is no HTTP, comes too slowly, or is too large is refused on every path
ERROR = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"enum": sorted({kind for kind, _ in KINDS.values()})},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
STREAM = {"schema": {"description": "with stream=true: server-sent events, the last of them data: [DONE]"}}


def takes(kind: type, answer: str) -> dict:
    """Of a route that reads a ``kind`` itself: how its body and its answers are described."""
    schema = {"$ref": REFS.format(model=kind.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    whole = {"type": "object", "required": ["id", "object", "created", "model", "choices", "usage"],
             "properties": {"object": {"const": answer}, "choices": {"type": "array", "minItems": 1}}}  # fmt: skip
    ok = {"description": "the answer", "content": {"application/json": {"schema": whole}, "text/event-stream": STREAM}}
    return {"openapi_extra": {"requestBody": body}, "responses": {200: ok} | errors(404, 429, 500, 503)}


def errors(*statuses: int) -> dict:
    """Of a route: these, each with a body in OpenAI's shape."""
    schema = {"$ref": REFS.format(model="Error")}
    return {status: {"description": "an error in OpenAI's shape", "content": {"application/json": {"schema": schema}}}
            for status in statuses}  # fmt: skip


def describe(app: FastAPI, model_name: str, vocab_size: int, with_key: bool) -> dict:
    """The description of ``app``; with_key: clients need one."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema([(CompletionRequest, "validation"), (ChatRequest, "validation")],
                                    ref_template=REFS)  # fmt: skip
    for kind in (CompletionRequest, ChatRequest):
        _limit(schemas["$defs"][kind.__name__]["properties"], model_name, vocab_size)
    components = found.setdefault("components", {})
    components["schemas"] = schemas["$defs"] | {"Error": ERROR}
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    found["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["schema"] = {"type": "string", "enum": [model_name]}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own error: here it is a 400
            guarded = with_key and path.startswith(PROTECTED)
            for status, answer in errors(*ANYWHERE, *([401] if guarded else [])).items():
                operation["responses"].setdefault(str(status), answer)
            if guarded:
                operation["security"] = [{"key": []}]
    return found


def _limit(fields: dict, model_name: str, vocab_size: int) -> None:
    """Write down the limits that are not pydantic's: those of ``params`` and of SamplingParams."""
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    ids = {"type": "array", "items": token, "minItems": 1}
    text, stop = {"type": "string", "minLength": 1}, {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
    stops = {"type": "array", "items": stop, "maxItems": MAX_STOPS}
    fields["model"]["enum"] = [model_name]
    fields["seed"] = {"anyOf": [{"type": "integer", "minimum": -SEED_LIMIT, "maximum": SEED_LIMIT - 1},
                                {"type": "null"}]}  # fmt: skip
    fields["stop"]["anyOf"] = [stop, stops, {"type": "null"}]
    fields["stop_token_ids"]["anyOf"] = [ids | {"minItems": 0}, {"type": "null"}]
    fields["allowed_token_ids"]["anyOf"] = [ids, {"type": "null"}]
    bias = {"type": "number", "minimum": -100, "maximum": 100}
    # the keys are token ids, as strings of digits
    fields["logit_bias"]["anyOf"] = [
        {
            "type": "object",
            "patternProperties": {"^(0|[1-9][0-9]*)$": bias},
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
    word = {"type": "string", "pattern": r"\S", "maxLength": MAX_STOP_LENGTH}
    words = {"type": "array", "items": word, "maxItems": MAX_BAD_WORDS}
    fields["bad_words"]["anyOf"] = [words, {"type": "null"}]
    if "prompt" in fields:
        several = [{"type": "array", "items": item, "minItems": 1} for item in (text, ids)]
        fields["prompt"]["anyOf"] = [text, ids, *several]
    for name in fields.keys() & NEUTRAL.keys():  # as in params.parse: the values that ask for nothing
        fields[name] = {"enum": [*NEUTRAL[name], None], "description": "not supported"}
