"""The public face: the calls that people bring from nano-vllm and vLLM, text, streams, chat, errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.attention.torch_attention import TorchAttention
from nanoengine.engine.scheduler import TokenBudgetScheduler
from nanoengine.model.embedded import embedded_model_folder
from nanoengine.sim import SlotRunner

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["Hello", "a b c", "你好, KV"]


def tiny(**settings) -> LLM:
    settings = {"max_model_len": 200, "num_blocks": 60, "block_size": 4, "device": "cpu"} | settings
    return LLM("tiny-llama", load_format="dummy", **settings)


@pytest.fixture(scope="module")
def shared():
    with tiny() as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """One engine for all tests, which must leave it empty."""
    yield shared
    assert is_empty(shared)


def is_empty(llm: LLM) -> bool:
    engine = llm.engine
    engine.block_manager.check_invariants([])
    return not engine.has_unfinished() and engine.block_manager.num_free_blocks == engine.block_manager.num_blocks


def texts(outputs) -> list[str]:
    return [out.text for out in outputs]


# calls of nano-vllm and vLLM


def test_calls_as_in_nano_vllm_and_vllm():
    path = str(embedded_model_folder(progress=False))
    llm = LLM(path, enforce_eager=True, tensor_parallel_size=1, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=6)
    a = llm.generate(["The capital of France is", "1 2 3 4"], params)  # nano-vllm: a list, one SamplingParams
    b = llm.generate(["The capital of France is", "1 2 3 4"], [params, params], use_tqdm=False)
    ids = [llm.tokenizer.encode(text) for text in ("The capital of France is", "1 2 3 4")]
    c = llm.generate(ids, params, use_tqdm=False)
    d = llm.generate([{"prompt_token_ids": i} for i in ids], params, use_tqdm=False)  # vLLM
    e = llm.generate([{"prompt": "The capital of France is"}, {"prompt": "1 2 3 4"}], params, use_tqdm=False)
    assert "Paris" in a[0].text
    assert texts(a) == texts(b) == texts(c) == texts(d) == texts(e)
    for out in a:
        assert out["text"] == out.text == out.outputs[0].text
        assert out["token_ids"] == out.token_ids == out.outputs[0].token_ids
        assert out.finished and out.outputs[0].finish_reason == out.finish_reason == "length"
        assert "text" in out and dict(out)["text"] == out.text and set(out) == set(out.keys())
        with pytest.raises(KeyError):
            out["nonsense"]
    assert [out.prompt for out in a] == ["The capital of France is", "1 2 3 4"]
    assert [out.prompt for out in c] == [None, None] and [out.prompt_token_ids for out in c] == ids
    assert llm.engine.runner.dtype == torch.float32, "bf16 without bf16 units is slower: fp32 is the default on a CPU"
    answer = llm.chat("Say hi.", SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0]
    assert answer.finish_reason == "stop" and answer.stop_reason == answer.token_ids[-1] == 2
    assert "<|im_end|>" not in answer.text and answer.text.strip() == answer.text
    llm.close()


# what a prompt may be


def one(llm, prompt) -> list[int]:
    outputs = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert len(outputs) == 1
    return outputs[0].token_ids


def test_every_shape_of_one_prompt(llm):
    ids = list(b"hi")
    want = one(llm, "hi")
    shapes = [ids, tuple(ids), np.array(ids), torch.tensor(ids), {"prompt": "hi"}, {"prompt_token_ids": ids}, ["hi"],
              [ids], [np.array(ids)], [torch.tensor(ids)], [{"prompt": "hi", "prompt_token_ids": ids}],
              [{"prompt_token_ids": np.array(ids)}], ("hi",), [range(ids[0], ids[0] + 2)]]  # fmt: skip
    assert list(range(ids[0], ids[0] + 2)) == ids
    for shape in shapes:
        assert one(llm, shape) == want, shape


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt is empty"),
        (["ok", ""], "prompt is empty"),
        ([[]], "prompt is empty"),
        ([1, 2, 1024], r"prompt_token_ids\[2\] is 1024, outside the vocabulary \[0, 1024\)"),
        ([[1], [-1]], "is -1"),
        ([1, 2.0], "prompt"),
        (["ok", None], "got NoneType"),
        (None, "got NoneType"),
        (7, "got int"),
        (b"bytes", "got bytes"),
        ([b"bytes"], "got bytes"),
        ((p for p in ["a"]), "got generator"),
        ([itertools.count()], "max_model_len=200"),
        ({}, "key 'prompt'"),
        ({"text": "x"}, "'text'"),
        ({"prompt": None}, "got NoneType"),
        ({"prompt": "x", "prompt_token_ids": "x"}, "must be a list of token ids"),
        (["x" * 200], "max_model_len=200"),
        ("\ud800", "surrogates"),
        ([True, False], "must be an integer"),
    ],
)
def test_bad_prompts_are_value_errors_and_start_nothing(llm, prompts, message):
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match=message):
            call(prompts, GREEDY)
        if not hasattr(prompts, "gi_frame"):
            assert is_empty(llm)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "sampling_params has 1 entries for 2 prompts"),
        ([GREEDY] * 3, "sampling_params has 3 entries for 2 prompts"),
        ([], "sampling_params has 0 entries"),
        ({"temperature": 0}, "must be a SamplingParams, got dict"),
        ([GREEDY, "x"], "must be a SamplingParams, got str"),
        (SamplingParams(stop_token_ids=[5000]), "stop_token_ids contains 5000"),
    ],
)
def test_bad_parameters_are_value_errors_and_start_nothing(llm, params, message):
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match=message):
            call(["a", "b"], params)
        assert is_empty(llm)


def test_one_bad_request_takes_the_whole_call_back_and_the_next_works(llm):
    want = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.generate([*PROMPTS, [5000]], GREEDY, use_tqdm=False)
    assert is_empty(llm)
    assert texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == want


def test_an_interrupt_while_requests_are_added_takes_them_back(llm, monkeypatch):
    real = llm.engine.scheduler.add

    def add(seq):
        real(seq)
        if len(llm.engine.sequences) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.scheduler, "add", add)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_nothing_to_do(llm):
    assert llm.generate([]) == [] and llm.generate([], []) == []
    assert list(llm.stream([])) == []


def test_the_limit_of_the_model_ends_with_length(llm):
    out = llm.generate([[7] * 150], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)[0]
    assert (len(out.token_ids), out.finish_reason, out.stop_reason) == (50, "length", None)


def test_requests_that_were_added_before_do_not_leak(llm):
    early = llm.engine.add_request([1, 2, 3], GREEDY)
    outputs = llm.generate(["x"], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(outputs) == 1 and outputs[0].prompt == "x" and len(outputs[0].token_ids) == 3
    assert early.finish_reason is None and early.num_output_tokens >= 2, "it goes on beside"
    for _ in llm.engine.run():
        pass
    assert early.output_ids == one(llm, [1, 2, 3])


def test_order_index_ids_metrics_and_cached_tokens(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    prompts = [[300 + i] * 9 for i in range(3)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(out.token_ids) for out in outputs] == [9, 2, 5]
    assert [out.index for out in outputs] == [0, 1, 2]
    assert len({out.request_id for out in outputs}) == 3
    assert [out.num_cached_tokens for out in outputs] == [0, 0, 0]
    for out in outputs:
        assert out.metrics["arrival"] <= out.metrics["first_token"] <= out.metrics["finished"]
        assert out.metrics["preemptions"] == 0
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [out.num_cached_tokens for out in again] == [8, 8, 8]
    assert [out.token_ids for out in again] == [out.token_ids for out in outputs]


def test_the_progress_bar_can_be_hidden(llm, capfd):
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert "".join(capfd.readouterr()) == ""
    llm.generate(PROMPTS, GREEDY)
    shown = capfd.readouterr().err
    assert "requests: 100%" in shown and "3/3" in shown and "out " in shown and "tok/s" in shown


# the constructor


def test_unknown_keywords_are_type_errors_that_name_them():
    with pytest.raises(TypeError, match="'max_batch'.*max_num_seqs"):
        tiny(max_batch=3)
    with pytest.raises(TypeError, match="temperature"):
        tiny().generate("x", temperature=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_model_len=4096), "max_model_len=4096 is more than the model's 2048"),
        (dict(tensor_parallel_size=3), "tensor_parallel_size=3 does not divide"),
        (dict(vocab_size=2000), "vocab_size=2000.*1024"),
        (dict(kv_cache_gib=1e-6, num_blocks=None), "kv_cache_gib"),
        (dict(dtype="int8"), "dtype"),
    ],
)
def test_settings_that_cannot_be_served(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny(**settings)


def test_cuda_without_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=f"'{device}'.*nanoengine doctor.*device='cpu'"):
            tiny(device=device)


def test_by_default_the_models_own_length():
    with LLM("tiny-qwen3", load_format="dummy", device="cpu") as llm:
        assert llm.config.max_model_len == 2048
        assert llm.engine.runner.kv_cache.numel() * 4 <= 2**30
    with LLM("tiny-qwen3", load_format="dummy", device="cpu", max_model_len=None) as llm:
        assert llm.config.max_model_len == 2048


def test_two_at_once_do_not_share_anything(llm):
    with tiny(overlap=1) as second:
        first_stream, second_stream = llm.stream(PROMPTS, GREEDY), second.stream(PROMPTS, GREEDY)
        pairs = list(itertools.zip_longest(first_stream, second_stream))
        assert pairs and is_empty(second)
        assert texts(second.generate(PROMPTS, GREEDY, use_tqdm=False)) == texts(llm.generate(PROMPTS, GREEDY))


def test_closed():
    with tiny() as llm:
        stream = llm.stream("abc", GREEDY)
        assert next(stream).finish_reason is None
    rest = list(stream)
    assert [item.finish_reason for item in rest] == ["abort"]
    for call in (lambda: llm.generate("x"), lambda: llm.stream("x"), lambda: llm.chat("x")):
        with pytest.raises(RuntimeError, match="was closed: make a new one"):
            call()
    llm.close()  # twice is fine


def test_own_parts():
    used = set()

    class Mine(TokenBudgetScheduler):
        def schedule(self):
            used.add("scheduler")
            return super().schedule()

    class Attention(TorchAttention):
        def __call__(self, *args):
            used.add("attention")
            return super().__call__(*args)

    def sampler(logits, seqs, positions):
        used.add("sampler")
        return torch.full((len(seqs),), 65)

    with tiny(scheduler=Mine, attention_backend=Attention(), sampler=sampler) as llm:
        assert llm.generate("x", GREEDY, use_tqdm=False)[0].text == "A" * 8
    assert used == {"scheduler", "attention", "sampler"}
    with tiny(runner=SlotRunner(20, 4, 1024)) as llm:
        assert len(llm.generate("x", GREEDY, use_tqdm=False)[0].token_ids) == 8
    with pytest.raises(TypeError, match="sampler: a runner of your own brings its own parts"):
        tiny(runner=SlotRunner(20, 4, 1024), sampler=sampler)
