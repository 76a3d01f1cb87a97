"""sampling_options on a GPU: the tokens and logprobs of plain eager torch, with graphs, overlap and fused kernels."""

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.trace import record

TINY = dict(load_format="dummy", max_model_len=256, dtype="float32", num_blocks=400)
PLAIN = dict(overlap=0, enforce_eager=True, fused_kernels=False, attention="torch")
PROMPTS = [
    dict(prompt_token_ids=[(7 * i + 3 * j) % 1000 for j in range(1 + 17 * i)]) for i in range(9)
]
WORDS = [[a, b] for a in range(0, 1000, 3) for b in range(0, 1000, 10)]
KINDS = [
    dict(temperature=0),
    dict(temperature=0, prompt_logprobs=3),
    dict(logit_bias=dict.fromkeys(range(0, 1000, 7), 5.0)),
    dict(allowed_token_ids=range(50, 90), temperature=0, prompt_logprobs=0),
    dict(bad_words_ids=WORDS, temperature=0),
    dict(temperature=0.9, prompt_logprobs=2, logprobs=2),
    dict(allowed_token_ids=[5, 6, 7], bad_words_ids=[[5, 6], [6, 7], [7, 5]], temperature=1.0),
    dict(top_k=9, logit_bias={3: -100, 8: 2.5}, repetition_penalty=1.2, min_tokens=4),
    dict(temperature=1.0),
]


def params():
    return [
        SamplingParams(seed=i, max_tokens=12, ignore_eos=True, **kind)
        for i, kind in enumerate(KINDS)
    ]


def outputs(model="tiny-qwen3", **settings):
    with LLM(model, **TINY | settings) as llm:
        for _ in range(2):  # the second time with a full prefix cache
            outs = llm.generate(PROMPTS, params(), use_tqdm=False)
        assert all(out.num_cached_tokens == 0 for out in outs if out.prompt_logprobs)
        return outs


def assert_same(found, wanted):
    assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)
        pairs = zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True)
        for position, (entry, expected) in enumerate(pairs):
            assert (entry is None) == (expected is None) == (position == 0)
            own = ours.prompt_token_ids[position]
            if position:
                assert sorted(entry.values()) == pytest.approx(sorted(expected.values()), abs=2e-3)
                assert entry[own] == pytest.approx(expected[own], abs=2e-3)


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
def test_sampling_options_are_those_of_plain_eager_torch(model):
    wanted = outputs(model, **PLAIN)
    assert_same(outputs(model), wanted)
    assert_same(outputs(model, overlap=0), wanted)
    assert_same(outputs(model, max_num_batched_tokens=33, max_num_seqs=5), wanted)
    assert_same(outputs(model, num_blocks=20, max_num_batched_tokens=40), wanted)
    assert_same(outputs(model, policy="prefill_first"), wanted)


def test_sampling_options_leave_plain_rows_on_graphs():
    """A step without prompt_logprobs is a replay even where its rows ask for options."""
    with LLM("tiny-qwen3", **TINY) as llm, record(llm) as trace:
        llm.generate(PROMPTS, params(), use_tqdm=False)
    buckets = [step["graph_bucket"] for step in trace]
    assert None in buckets[:1] and None not in buckets[3:]


def test_sampling_options_wait_for_no_gpu():
    """Those that depend on no history: the host runs ahead of the GPU, also with prompt_logprobs."""
    options = [
        dict(logit_bias={5: 2.0}),
        dict(allowed_token_ids=range(50)),
        dict(bad_words_ids=[[1], [2]]),
        {},
    ]
    with LLM("tiny-qwen3", **TINY) as llm:
        for i, option in enumerate(options):
            llm.engine.add_request(
                [1, 2, 3, i], SamplingParams(max_tokens=200, ignore_eos=True, **option)
            )
        for _ in range(4):
            llm.engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for i in range(30):
                if i == 10:
                    params = SamplingParams(max_tokens=200, ignore_eos=True, prompt_logprobs=2)
                    llm.engine.add_request([5, 6, 7, i], params)
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_sampling_options_memory_of_prompt_logprobs_was_measured():
    """A long prompt of a large vocabulary, beside a pool that takes all the rest: the peak is that of a part."""
    with LLM(
        "qwen3-0.6b", load_format="dummy", max_model_len=8192, gpu_memory_utilization=0.5
    ) as llm:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        prompt = dict(prompt_token_ids=[(7 * i) % 150_000 for i in range(8000)])
        [out] = llm.generate(
            prompt, SamplingParams(max_tokens=2, prompt_logprobs=20), use_tqdm=False
        )
        assert len(out.prompt_logprobs) == 8000
        whole = 8000 * llm.model_config.vocab_size * 4
        assert torch.cuda.max_memory_allocated() - before < whole / 4
