"""The API over HTTP: whole answers and streams."""

import math

import httpx
import openai
import pytest

from nanoengine.llm import LLM
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import expected_output
from nanoengine.tokenizer.tokenizer import byte_tokenizer
from tests.server.conftest import VOCAB, Saying, aborted, ask, events, make_engine, running, until


@pytest.fixture(scope="module")
def tiny():
    """A real (random) model, for logprobs."""
    with LLM("tiny-llama", load_format="dummy", max_model_len=256, num_blocks=64) as llm:
        with running(llm.engine, llm.tokenizer) as server:
            server.llm = llm
            server.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            yield server


def test_completion_has_the_tokens_that_the_prompt_must_give(slots):
    with slots.client() as client:
        found = ask(client, prompt=[1, 2, 3], max_tokens=9).json()
    ids = expected_output([1, 2, 3], 9, VOCAB)
    assert found["object"] == "text_completion"
    assert found["choices"][0]["finish_reason"] == "length"
    decoder = byte_tokenizer(VOCAB)
    assert found["choices"][0]["text"].rstrip("\ufffd") == decoder.decode(ids).rstrip("\ufffd")
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12,
             "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    assert found["usage"] == usage


def test_several_prompts_are_several_choices(slots):
    prompts = [[1], [2, 3], [9] * 20]
    with slots.client() as client:
        alone = [ask(client, prompt=p, max_tokens=6).json()["choices"][0]["text"] for p in prompts]
        found = ask(client, prompt=prompts, max_tokens=6).json()
        with client.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": prompts, "max_tokens": 6,
                                                            "stream": True}) as response:  # fmt: skip
            chunks = events(response)
    assert [choice["text"] for choice in found["choices"]] == alone
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert found["usage"]["completion_tokens"] == 18
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == alone


def test_n_choices_of_each_prompt_come_by_index_and_the_prompt_counts_once(tiny):
    create = tiny.openai.completions.create
    asked = dict(model="tiny", prompt=["hello", "other"], seed=5, max_tokens=6, logprobs=1)
    whole = create(**asked, n=3)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [len({choice.text for choice in choices}) for choices in (whole.choices[:3], whole.choices[3:])] == [3, 3]
    assert [choice.text for choice in whole.choices][::3] == [choice.text for choice in create(**asked).choices]
    assert all(len(choice.logprobs.tokens) == 6 and choice.finish_reason == "length" for choice in whole.choices)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 36)
    streamed, ends = [""] * 6, []
    for chunk in create(**asked, n=3, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            ends += [choice.index] * (choice.finish_reason == "length")
    assert streamed == [choice.text for choice in whole.choices] and sorted(ends) == list(range(6))
    assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (10, 36)
    assert tiny.is_idle


def test_n_choices_of_a_chat(tiny):
    talk = [{"role": "user", "content": "a"}]
    create = tiny.openai.chat.completions.create
    asked = dict(model="tiny", messages=talk, seed=5, max_tokens=6)
    whole, one = create(**asked, n=4, logprobs=True), create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].message.content == one.choices[0].message.content
    assert len({choice.message.content for choice in whole.choices}) == 4
    assert all(len(choice.logprobs.content) == 6 for choice in whole.choices)
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens and whole.usage.completion_tokens == 24
    roles, texts = [], [""] * 4
    for chunk in create(**asked, n=4, stream=True):
        [choice] = chunk.choices
        roles += [choice.index] * (choice.delta.role == "assistant")
        texts[choice.index] += choice.delta.content or ""
    assert roles == [0, 1, 2, 3] and texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_all_its_choices(slots, stream):
    slots.engine.runner.delay = 0.01
    with slots.client() as client:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "n": 5, "stream": stream}
        try:
            with client.stream("POST", "/v1/completions", json=body, timeout=0.5) as response:
                next(response.iter_lines())
        except httpx.ReadTimeout:
            assert not stream
        until(lambda: slots.is_idle)
        assert sum(aborted(client).values()) == 5


def test_requests_share_with_their_own_salt_only(slots):
    def cached(path="/v1/completions", **body):
        return ask(client, path, max_tokens=2, **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with slots.client() as client:
        text = "a text that is longer than one block"
        first, again = cached(prompt=text), cached(prompt=text, cache_salt=None)
        assert first == 0 < again
        assert [cached(prompt=text, cache_salt=salt) for salt in ("x", "x", "y", "y")] == [0, again, 0, again]
        talk = {"messages": [{"role": "user", "content": text}], "path": "/v1/chat/completions"}
        assert [cached(**talk, cache_salt=salt) > 0 for salt in ("x", "y", "x", "y")] == [False, False, True, True]


def test_the_default_is_16_tokens_and_a_seed_repeats(tiny):
    create = tiny.openai.completions.create
    one, two = (create(model="tiny", prompt="hello", seed=5) for _ in range(2))
    assert one.usage.completion_tokens == 16
    assert one.choices[0].text == two.choices[0].text
    assert create(model="tiny", prompt="hello", seed=6).choices[0].text != one.choices[0].text


def test_the_stream_joins_to_the_whole_and_ends_with_usage(tiny):
    asked = dict(model="tiny", messages=[{"role": "user", "content": "你好"}], max_completion_tokens=12, temperature=0)
    whole = tiny.openai.chat.completions.create(**asked)
    chunks = list(tiny.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content != ""
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_is_what_llm_chat_says(tiny):
    talk = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "refusal": None, "tool_calls": []},
            {"role": "user", "content": [{"type": "text", "text": "c"}]}]  # fmt: skip
    found = tiny.openai.chat.completions.create(model="tiny", messages=talk, max_tokens=8, temperature=0)
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
             {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]  # fmt: skip
    until(lambda: tiny.is_idle)
    with LLM("tiny-llama", load_format="dummy", max_model_len=256, num_blocks=64) as llm:
        [out] = llm.chat(plain, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    assert found.choices[0].message.content == out.text
    assert found.usage.prompt_tokens == len(out.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(tiny, stream):
    asked = dict(model="tiny", prompt="hello", max_tokens=20, temperature=0)
    text = tiny.openai.completions.create(**asked).choices[0].text
    stop = text[7:15]  # spans tokens
    asked |= {"stop": [stop, "never"]}
    if stream:
        chunks = list(tiny.openai.completions.create(**asked, stream=True))
        got, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = tiny.openai.completions.create(**asked).choices[0]
        got, reason = choice.text, choice.finish_reason
    assert (got, reason) == (text[: text.index(stop)], "stop")


def test_chat_logprobs(tiny):
    asked = dict(model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=6, temperature=0, logprobs=True,
                 top_logprobs=3)  # fmt: skip
    choice = tiny.openai.chat.completions.create(**asked).choices[0]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    for entry in content:
        assert [top.logprob for top in entry.top_logprobs] == sorted(t.logprob for t in entry.top_logprobs)[::-1]
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob == entry.top_logprobs[0].logprob < 0
        assert bytes(entry.bytes).decode() == entry.token
    chunks = list(tiny.openai.chat.completions.create(**asked, stream=True))
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_completion_logprobs(tiny):
    choice = tiny.openai.completions.create(model="tiny", prompt="a", max_tokens=5, temperature=1, seed=1,
                                            logprobs=2).choices[0]  # fmt: skip
    found = choice.logprobs
    assert found.tokens[0] == "bytes:\\x88"  # no character by itself; this seed draws it
    tokens = ["\ufffd", *found.tokens[1:]]
    assert "".join(tokens) == choice.text
    assert found.text_offset == [len("".join(tokens[:i])) for i in range(len(tokens))]
    for token, own, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == own
        assert 2 <= len(top) <= 3  # the two likeliest, and the one drawn
        assert sum(math.exp(value) for value in top.values()) < 1


def test_metrics_count_what_happened(slots):
    with slots.client() as client:
        for _ in range(2):
            ask(client, prompt=list(range(1, 18)), max_tokens=5)
        text = client.get("/metrics").text
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    want = {"generation_tokens_total": 10, "prompt_tokens_total": 34, 'requests_total{reason="length"}': 2,
            "time_to_first_token_seconds_count": 2, "inter_token_latency_seconds_count": 8, "request_seconds_count": 2,
            "prefix_queried_tokens_total": 34, "prefix_hit_tokens_total": 16, "preemptions_total": 0,
            "requests_running": 0, "requests_waiting": 0, "kv_blocks_free": 256, "kv_use_ratio": 0}  # fmt: skip
    assert {name: float(numbers[f"nanoengine_{name}"]) for name in want} == want


def test_the_description_has_every_field_of_a_request(slots):
    with slots.client() as client:
        found = client.get("/openapi.json").json()
    schemas = found["components"]["schemas"]
    assert {"CompletionRequest", "ChatRequest", "Message"} <= set(schemas)
    body = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    fields = schemas["ChatRequest"]["properties"]
    assert "max_completion_tokens" in fields
    assert fields["model"]["enum"] == ["tiny"]
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 128}
    assert fields["cache_salt"]["anyOf"][0] == {"type": "string", "minLength": 1}


def test_the_client_of_hugging_face(tiny):
    """huggingface_hub's InferenceClient, the other client that many people have."""
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=f"{tiny.url}/v1", api_key="none")
    talk = [{"role": "user", "content": "a"}]
    whole = client.chat_completion(talk, model="tiny", max_tokens=9, temperature=0, logprobs=True, top_logprobs=1)
    text = whole.choices[0].message.content
    assert "".join(entry.token for entry in whole.choices[0].logprobs.content) == text
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 9)
    streamed = list(client.chat_completion(talk, model="tiny", max_tokens=9, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
    stopped = client.chat_completion(talk, model="tiny", max_tokens=9, temperature=0, stop=[text[4:9]])
    assert stopped.choices[0].message.content == text[: text.index(text[4:9])]
    leaving = client.chat_completion(talk, model="tiny", max_tokens=200, temperature=0, stream=True)
    next(iter(leaving))
    leaving.close()
    until(lambda: tiny.is_idle)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_last_chunk_says_what_stopped_it(path):
    body = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    with running(make_engine(runner=Saying("one STOP two"))) as server, server.client() as client:
        for stop, reason in (({"stop": ["STOP"]}, "STOP"), ({"stop_token_ids": [ord("T")]}, ord("T")),
                             ({"max_tokens": 3}, None)):  # fmt: skip
            asked = {"model": "tiny", "max_tokens": 12} | body | stop
            whole = client.post(f"/v1/{path}", json=asked).json()["choices"][0]
            with client.stream("POST", f"/v1/{path}", json=asked | {"stream": True}) as response:
                choices = [event["choices"][0] for event in events(response)]
            assert whole["stop_reason"] == choices[-1]["stop_reason"] == reason
            assert all(choice["stop_reason"] is None for choice in choices[:-1])


def test_buckets_reach_below_the_times_of_a_fast_gpu(slots):
    with slots.client() as client:
        text = client.get("/metrics").text
    for name, bound in (("time_to_first_token_seconds", 0.005), ("inter_token_latency_seconds", 0.0005),
                        ("request_seconds", 0.01)):  # fmt: skip
        assert f'nanoengine_{name}_bucket{{le="{bound}"}}' in text
