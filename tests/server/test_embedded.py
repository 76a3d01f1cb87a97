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
            server.answer = answer
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
