"""Bodies drawn at random, good and bad mixed: never a 500, never a hang, nothing left behind."""

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.server.protocol import ChatRequest, CompletionRequest
from tests.server.conftest import VOCAB, make_engine, running

ODD = [None, True, False, 0, -1, 1, 2, 3.5, -0.0, 1e308, 2**31, -(2**63), 2**64, 10**40, "", "a", "\x00\x1f", "😀",
       "ab" * 300,
       [], [1], [[1, 2]], ["a", 1], [None], {}, {"a": 1}, {"type": "text"}, [{"role": "user", "content": "a"}],
       [{"role": "user"}], [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]]  # fmt: skip
GOOD = {
    "prompt": ["hello", [1, 2], ["a", "b"], [[3], [4, 5]]], "messages": [[{"role": "user", "content": "a"}]],
    "max_tokens": [1, 3], "max_completion_tokens": [2], "temperature": [0, 1, 0.5], "top_p": [0.5], "seed": [1],
    "stop": ["a", ["a", "b"]], "stream": [True, False], "logprobs": [1, True], "top_k": [3], "min_tokens": [1],
    "ignore_eos": [True], "stop_token_ids": [[5]], "n": [1, 2, 3], "cache_salt": ["a"],
    "stream_options": [{"include_usage": True}],
}  # fmt: skip


def drawn_body(draw: random.Random, kind) -> dict:
    """Mostly what is right, sometimes an odd value or an odd name."""
    body = {"model": "tiny", "max_tokens": 3}
    body |= {"prompt": "a"} if kind is CompletionRequest else {"messages": GOOD["messages"][0]}
    for name in draw.sample(sorted(kind.model_fields), k=draw.randint(0, 4)):
        good = draw.random() < 0.5 and name in GOOD
        body[name] = draw.choice(GOOD[name] if good else ODD)
    if draw.random() < 0.1:
        body[draw.choice(["x", "", "prompt ", "__class__", "a.b"])] = draw.choice(ODD)
    return body


def test_no_body_makes_a_500_or_stays_behind():
    draw = random.Random(11)
    counts: dict[int, int] = {}
    with running(make_engine(), request_timeout_s=20) as server, server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
        for number in range(200):
            path, kind = draw.choice([("completions", CompletionRequest), ("chat/completions", ChatRequest)])
            body = drawn_body(draw, kind)
            response = client.post(f"/v1/{path}", json=body)
            assert response.status_code in (200, 400, 404), (number, body, response.text)
            described = paths[f"/v1/{path}"]["post"]["responses"][str(response.status_code)]["content"]
            assert response.headers["content-type"].partition(";")[0] in described
            counts[response.status_code] = counts.get(response.status_code, 0) + 1
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            elif body.get("stream") is True:
                assert response.text.endswith("data: [DONE]\n\n")
                assert '"error"' not in response.text
            else:
                assert response.json()["usage"]["completion_tokens"] >= 1
        assert min(counts[200], counts[400]) > 40, counts  # both kinds were really tried
        assert server.is_idle
        assert server.stats.failures == 0


def test_no_bytes_make_a_500():
    with running(make_engine()) as server, server.client() as client:
        start = json.dumps({"model": "tiny", "prompt": [VOCAB - 1], "max_tokens": 2}).encode()

        @settings(max_examples=80, deadline=None, derandomize=True)
        @given(st.binary(max_size=40), st.integers(0, len(start)), st.integers(0, len(start)))
        def damaged(extra: bytes, begin: int, end: int) -> None:
            data = start[:begin] + extra + start[end:]
            response = client.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
            assert response.status_code in (200, 400, 404), (data, response.text)

        damaged()
        assert server.is_idle
