"""The official client against the embedded model: what a user of the server sees."""

import threading

import openai
import pytest

from nanoengine.llm import LLM
from nanoengine.sampling_params import SamplingParams
from tests.server.conftest import aborted, running, until

TALK = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def served():
    with LLM(max_model_len=1024, num_blocks=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        [answer] = llm.chat(TALK, params, use_tqdm=False)
        with running(llm.engine, llm.tokenizer, model_name=MODEL) as server:
            server.answer, server.tokenizer = answer, llm.tokenizer
            server.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            yield server


def create(served, **options):
    return served.openai.chat.completions.create(model=MODEL, messages=TALK, temperature=0, **options)


def test_chat_whole_and_streamed_is_what_llm_says(served):
    found = create(served, max_completion_tokens=24)
    assert "Paris" in served.answer.text
    assert found.choices[0].message.content == served.answer.text
    assert found.choices[0].finish_reason == served.answer.finish_reason
    assert found.usage.prompt_tokens == len(served.answer.prompt_token_ids)
    assert found.usage.completion_tokens == len(served.answer.token_ids)
    chunks = list(create(served, max_completion_tokens=24, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == served.answer.text
    assert chunks[-1].choices[0].finish_reason == served.answer.finish_reason


def test_stop_string_and_logprobs(served):
    found = create(served, max_completion_tokens=24, stop="Paris", logprobs=True, top_logprobs=2).choices[0]
    assert found.message.content == served.answer.text.partition("Paris")[0]
    assert found.finish_reason == "stop"
    for entry in found.logprobs.content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy


def test_leaving_a_stream_frees_its_blocks_before_the_next_step(served):
    stream = create(served, max_completion_tokens=800, stream=True, extra_body={"ignore_eos": True})
    for _, _chunk in zip(range(4), stream, strict=False):
        pass
    assert served.stats.free_blocks < served.stats.num_blocks
    stream.close()
    with served.client() as client:
        until(lambda: aborted(client))
        assert aborted(client) == {"0": 1}
    until(lambda: served.is_idle)


def test_many_tasks_get_what_each_gets_alone(served):
    prompts = ["The sun is", "One, two, three,", "Water is made of"]

    def complete(prompt: str) -> str:
        found = served.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0)
        return found.choices[0].text

    alone, together = {prompt: complete(prompt) for prompt in prompts}, {}
    threads = [threading.Thread(target=lambda p=p: together.update({p: complete(p)})) for p in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_a_control_token_that_a_user_typed_is_taken_as_that_token(served):
    """As transformers does: in LLM and server, in chats and in completions."""
    from transformers import AutoTokenizer

    ours = served.service.tokenizer
    theirs = AutoTokenizer.from_pretrained(ours.source)
    end, typed = ours.backend.token_to_id("<|im_end|>"), "a<|im_end|>b"
    talk = [{"role": "user", "content": typed}]
    plain, chat = theirs(typed)["input_ids"], theirs.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    assert ours.encode(typed) == plain
    assert ours.encode(ours.apply_chat_template(talk), add_special_tokens=False) == chat
    assert (plain.count(end), chat.count(end)) == (1, 3)  # of a chat the template wrote two
    completion = served.openai.completions.create(model=MODEL, prompt=typed, max_tokens=1)
    assert completion.usage.prompt_tokens == len(plain)
    found = served.openai.chat.completions.create(model=MODEL, messages=talk, max_tokens=1)
    assert found.usage.prompt_tokens == len(chat)


def completion(served, prompt, **extra):
    return served.openai.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4, extra_body=extra)


def test_options_of_vllm_do_what_they_do_in_llm(served):
    """logit_bias with string keys, allowed_token_ids, bad_words, prompt_logprobs; in both kinds of request."""
    encode = served.tokenizer.encode
    ask, paris, rome = "The capital of France is", encode(" Paris")[0], encode(" Rome")[0]
    assert completion(served, ask).choices[0].text.startswith(" Paris")
    for extra in (dict(logit_bias={str(paris): -100}), dict(bad_words=["Paris"])):
        assert "Paris" not in completion(served, ask, **extra).choices[0].text
        assert "Paris" not in create(served, max_completion_tokens=12, extra_body=extra).choices[0].message.content
    assert completion(served, ask, logit_bias={str(rome): 100}).choices[0].text == " Rome" * 4
    assert completion(served, ask, allowed_token_ids=[rome]).choices[0].text == " Rome" * 4

    choice = completion(served, ask, prompt_logprobs=1).choices[0]
    first, *others = choice.prompt_logprobs
    ids = encode(ask)
    assert first is None and len(others) == len(ids) - 1
    for token, entry in zip(ids[1:], others, strict=True):
        assert entry[str(token)]["decoded_token"] == served.tokenizer.decode([token])
        assert all(value["logprob"] <= 0 for value in entry.values()) and len(entry) <= 2
    talk = create(served, max_completion_tokens=1, extra_body=dict(prompt_logprobs=0))
    assert len(talk.prompt_logprobs) == talk.usage.prompt_tokens
    assert "prompt_logprobs" not in completion(served, ask).model_dump()["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_special_token_as_stop_string(served, stream, include):
    """The model's end token, which is ignored: found by its text, which is left out of the answer."""
    end = served.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    extra = dict(ignore_eos=True, logit_bias={str(end[0]): 100}, include_stop_str_in_output=include, min_tokens=0)
    found = create(served, max_completion_tokens=5, stop="<|im_end|>", stream=stream, extra_body=extra)
    if stream:
        chunks = list(found)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = found.choices[0].message.content, found.choices[0].finish_reason
        assert found.usage.completion_tokens == 1
    assert (text, reason) == ("<|im_end|>" if include else "", "stop")


def test_the_options_are_described(served):
    with served.client() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for kind in ("CompletionRequest", "ChatRequest"):
        fields = schemas[kind]["properties"]
        for name in ("logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs", "include_stop_str_in_output"):
            assert "not supported" not in fields[name]["description"]
        assert fields["logit_bias"]["anyOf"][0]["patternProperties"]
