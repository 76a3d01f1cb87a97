"""An event of a stream is one line for every reader, whatever its text holds."""

import asyncio
import json
from types import SimpleNamespace

import openai

from nanoengine.jsonl import json_line
from nanoengine.server.answers import EventStream
from nanoengine.server.errors import ApiError
from tests.server.conftest import Saying, events, make_engine, running

LINE_ENDS = "\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"


def test_no_character_of_an_answer_ends_a_line_of_its_event():
    """httpx's iter_lines and every reader by str.splitlines end a line at more than a line feed."""
    text = f"é汉😀{LINE_ENDS}\n{LINE_ENDS}"
    assert len(text.splitlines()) > len(LINE_ENDS)
    asked = {"model": "tiny", "max_tokens": len(text.encode()), "stream": True}
    talk = [{"role": "user", "content": "a"}]
    with running(make_engine(runner=Saying(text))) as server, server.client() as client:
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": talk})):
            with client.stream("POST", f"/v1/{path}", json=asked | body) as response:
                choices = [event["choices"][0] for event in events(response)]  # by iter_lines
            assert "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in choices) == text
            raw = client.post(f"/v1/{path}", json=asked | body).content
            assert raw.decode().splitlines() == [line.decode() for line in raw.split(b"\n")[:-1]]
        official = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = official.chat.completions.create(messages=talk, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_any_value_is_one_line_of_json():
    for value in (f"é汉😀{LINE_ENDS}\n\ud800", {LINE_ENDS: [LINE_ENDS, 1.5, None]}):
        line = json_line(value)
        assert len(line.encode().decode().splitlines()) == 1
        assert json.loads(line) == value
    assert json_line({"a": "é汉😀"}) == '{"a":"é汉😀"}'


def test_error_events_stay_on_one_line():
    async def main():
        sent = []
        stream = EventStream(SimpleNamespace(abort=lambda: None), None, 1.0)

        async def send(message):
            sent.append(message["body"])

        await stream._last_word(ApiError(503, f"a{LINE_ENDS}b"), {}, send)
        return b"".join(sent)

    first, *_ = asyncio.run(main()).decode().splitlines()
    assert json.loads(first.removeprefix("data: "))["error"]["message"] == f"a{LINE_ENDS}b"
