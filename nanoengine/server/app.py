"""The application: routes over one engine. OpenAI's API, as far as one model on one machine has it."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from nanoengine import __version__
from nanoengine.engine.admission import ContextLengthError
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sampling_params import SamplingParams
from nanoengine.server.answers import EventStream, whole
from nanoengine.server.async_engine import AsyncEngine, EngineStopped, Overloaded
from nanoengine.server.browsers import App, Methods
from nanoengine.server.description import describe, errors, takes
from nanoengine.server.errors import ApiError, install
from nanoengine.server.limits import Limits
from nanoengine.server.metrics import CONTENT_TYPE, Metrics
from nanoengine.server.output_stream import Generation
from nanoengine.server.params import blame, chat_requests, completion_requests, parse
from nanoengine.server.protocol import ChatRequest, Common, CompletionRequest
from nanoengine.server.replies import ChatReplies, CompletionReplies, Replies
from nanoengine.server.trace_window import TraceWindow
from nanoengine.tokenizer.detokenizer import IncrementalDetokenizer
from nanoengine.tokenizer.tokenizer import Tokenizer

LONG_TEXT = 10_000  # characters: a few milliseconds of encoding


@dataclass(frozen=True)
class Settings:
    """model_name: what clients call it. api_key: None lets everyone in. max_waiting: see AsyncEngine.
    request_timeout_s: from arrival to the last byte. trace_steps: what /trace keeps; 0 turns it off.
    grace_s: how long a shutdown waits for what runs.
    cors_origins: whose pages may read answers, see browsers.App; by default none of another origin.
    keep_alive_s: how long an idle connection is kept. The default is more than the 60 to 90 s of
    proxies: the proxy must close first, or it sends a request into a connection that just closes.
    """

    model_name: str
    api_key: str | None = None
    max_waiting: int = 256
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    trace_steps: int = 0
    grace_s: float = 30.0
    cors_origins: tuple[str, ...] = ()
    keep_alive_s: float = 120.0


class Service:
    """What all routes share: the engine, the tokenizer, the counters."""

    def __init__(self, engine: LLMEngine, tokenizer: Tokenizer, settings: Settings,
                 on_thread_start: Callable[[], None] | None = None):  # fmt: skip
        self.tokenizer, self.settings = tokenizer, settings
        self.created = int(time.time())
        self.trace = TraceWindow(settings.trace_steps) if settings.trace_steps else None
        if self.trace is not None:
            engine.observer = self.trace
        self.metrics = Metrics()
        self.engine = AsyncEngine(engine, max_waiting=settings.max_waiting, listener=self.metrics.observe,
                                  on_thread_start=on_thread_start)  # fmt: skip
        self.metrics.watch(self.engine)
        self.max_prompts = self.engine.capacity  # of one request
        self.max_model_len = engine.config.max_model_len
        vocabulary = tokenizer.backend.get_vocab() if tokenizer.is_byte_level else ()
        # a character of the text gives at least a byte; a normaliser (NFC) makes one of up to three
        self._max_chars = 3 * self.max_model_len * max(map(len, vocabulary)) if vocabulary else math.inf

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenizer.encode, for threads beside the engine's: a long text does not hold the interpreter.

        Errors: ContextLengthError, before any work, for a text that cannot have fewer than
        max_model_len tokens.
        """
        if len(text) > self._max_chars:
            least = math.ceil(len(text) * self.max_model_len / self._max_chars)
            message = f"prompt has at least {least} tokens, max_model_len={self.max_model_len}"
            raise ContextLengthError(message, least, self.max_model_len)
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens)
        [encoded] = self.tokenizer.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def new_detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer:
        return IncrementalDetokenizer.of(self.tokenizer, params)

    async def add(self, requests: list, prompt: str = "prompt") -> Generation:
        """AsyncEngine.add, with its refusals as HTTP errors. prompt: the field they come from."""
        try:
            return await self.engine.add(requests)
        except Overloaded as error:
            raise ApiError(429, str(error), headers={"Retry-After": str(error.retry_after)}) from None
        except EngineStopped as error:
            raise ApiError(503, str(error), code="shutting_down") from None
        except ValueError as error:
            raise blame(error, prompt) from None

    def model_card(self) -> dict:
        return {"id": self.settings.model_name, "object": "model", "created": self.created, "owned_by": "nanoengine"}

    def check_model(self, name: str) -> None:
        if name != self.settings.model_name:
            raise ApiError(404, f"there is no model {name[:100]!r} here, only {self.settings.model_name!r}",
                           param="model", code="model_not_found")  # fmt: skip

    async def body(self, request: Request, kind: type[Common]):
        """The request's body as a checked ``kind``."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(400, "the body must be JSON: send the header 'Content-Type: application/json'")
        body = await asyncio.to_thread(parse, kind, await request.body())
        self.check_model(body.model)
        return body

    async def answer(self, request: Request, body: Common, requests: list, replies: type[Replies], num_top: int):
        """Queue the requests and answer them, as a stream if that is wanted."""
        usage = body.stream_options is not None and body.stream_options.include_usage
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        generation = await self.add(requests, field)
        made = replies(self.settings.model_name, self.tokenizer, num_choices=len(requests), n=body.n or 1,
                       include_usage=usage, num_top=num_top,
                       skip_special_tokens=requests[0].params.skip_special_tokens,
                       with_end=bool(body.include_stop_str_in_output))  # fmt: skip
        if body.stream:
            return EventStream(generation, made, self.settings.request_timeout_s)
        return await whole(request.receive, generation, made, self.settings.request_timeout_s)


def make_app(engine: LLMEngine, tokenizer: Tokenizer, settings: Settings,
             on_thread_start: Callable[[], None] | None = None) -> FastAPI:  # fmt: skip
    """The ASGI application; ``app.state.service`` is its Service. While it runs, nobody else may touch ``engine``."""
    service = Service(engine, tokenizer, settings, on_thread_start)

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        service.engine.start()
        yield
        await service.engine.shutdown(settings.grace_s)

    # the pages for trying the API out would load their scripts from the net; a redirect is no error in OpenAI's shape
    app = App(cors_origins=settings.cors_origins, title="nanoengine", version=__version__, lifespan=lifespan,
              docs_url=None, redoc_url=None, redirect_slashes=False)  # fmt: skip
    app.state.service = service

    def count(status: int) -> None:
        service.metrics.refused.labels(str(status)).inc()

    install(app, count)
    app.add_middleware(Limits, api_key=settings.api_key, max_body_bytes=settings.max_body_bytes,
                       body_timeout_s=settings.body_timeout_s, count=count)  # fmt: skip
    app.add_middleware(Methods, routes=app)
    _add_openai(app, service)
    _add_watching(app, service)
    description = functools.cache(lambda: describe(app, settings.model_name, engine.config.vocab_size or 2**31,
                                                   settings.api_key is not None))  # fmt: skip
    app.openapi = description
    return app


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [service.model_card()]}

    @app.get("/v1/models/{name:path}", responses=errors(404))
    async def model(name: str):
        service.check_model(name)
        return service.model_card()

    @app.post("/v1/completions", **takes(CompletionRequest, CompletionReplies.object))
    async def completions(request: Request):
        body = await service.body(request, CompletionRequest)
        requests = await asyncio.to_thread(completion_requests, body, service)
        return await service.answer(request, body, requests, CompletionReplies, body.logprobs or 0)

    @app.post("/v1/chat/completions", **takes(ChatRequest, ChatReplies.object))
    async def chat_completions(request: Request):
        body = await service.body(request, ChatRequest)
        requests = await asyncio.to_thread(chat_requests, body, service)
        return await service.answer(request, body, requests, ChatReplies, body.top_logprobs or 0)


def _add_watching(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=errors(503))
    async def health():
        if not service.engine.is_running:
            raise ApiError(503, "the engine has stopped or is shutting down")
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def metrics():
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    after = {"name": "after", "in": "query", "description": "steps after this number", "schema": {"type": "integer"}}

    @app.get("/trace", responses=errors(404), openapi_extra={"parameters": [after]})
    async def trace(request: Request):
        if service.trace is None:
            raise ApiError(404, "tracing is off: start the server with --trace-steps N")
        after = request.query_params.get("after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 18:
            raise ApiError(400, "after must be the number of a step", param="after")
        return JSONResponse(service.trace.newer_than(int(after)))
