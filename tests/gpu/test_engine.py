"""The engine's promises on a GPU: graphs at every batch size, overlap, memory, no hidden waiting."""

import gc

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.trace import record
from nanoengine.worker.cuda_graphs import mixed_sizes

TINY = dict(load_format="dummy", max_model_len=256, dtype="float32", num_blocks=400)
GIB = 2**30


def prompts(n):
    return [dict(prompt_token_ids=[(7 * i + 3 * j) % 1000 for j in range(1 + i % 40)]) for i in range(n)]


def params(n, **more):
    return [SamplingParams(temperature=0.8 * (i % 3 > 0), seed=i, max_tokens=6 + i % 5, **more) for i in range(n)]


def tokens(llm, n, **more):
    return [out.token_ids for out in llm.generate(prompts(n), params(n, **more), use_tqdm=False)]


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
def test_graphs_at_every_batch_size(model):
    with LLM(model, attention="torch", fused_kernels=False, overlap=0, max_num_seqs=21, **TINY) as plain:
        wanted = tokens(plain, 21)
    with LLM(model, max_num_seqs=21, **TINY) as llm:
        used = {True: set(), False: set()}
        for n in range(1, 22):
            with record(llm) as trace:
                assert tokens(llm, n) == wanted[:n], n
            for step in trace:
                one_each = all(row["tokens"] == 1 for row in step["rows"])
                used[one_each].add(step["graph_bucket"])
                assert step["graph_bucket"] >= sum(row["tokens"] for row in step["rows"])
    assert used[True] == {1, 2, 4, 8, 16, 21}
    assert used[False] <= set(mixed_sizes(8192)) and len(used[False]) > 3


def test_a_step_larger_than_the_largest_graph():
    """Its tokens are those of steps that fit: 6,000 tokens at once, then in chunks."""
    long = dict(load_format="dummy", max_model_len=2048, dtype="float32", num_blocks=1000)
    many = [dict(prompt_token_ids=[(7 * i + 3 * j) % 1000 for j in range(1500)]) for i in range(4)]
    found = []
    for most in (8192, 2000):
        with LLM("tiny-qwen3", max_num_batched_tokens=most, **long) as llm:
            with record(llm) as trace:
                found.append([out.token_ids for out in llm.generate(many, params(4), use_tqdm=False)])
            assert (None in {step["graph_bucket"] for step in trace}) == (most == 8192)
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [dict(), dict(enforce_eager=True), dict(fused_kernels=False), dict(overlap=0)])
def test_equal_and_nested_prompts_of_one_step_share_blocks(settings):
    """Greedy and drawn samples are those of a run without any prefix cache."""
    prompt = [(7 * j + j // 5) % 1000 for j in range(100)]
    several = [dict(prompt_token_ids=p) for p in [prompt] * 4 + [prompt[:50], prompt + [1, 2], prompt[:64] + [3] * 9]]
    options = [SamplingParams(temperature=0.8 * (i % 2), seed=i, n=1 + i % 3, max_tokens=6) for i in range(7)]
    found = []
    for more in (dict(attention="torch", fused_kernels=False, overlap=0, enable_prefix_caching=False), settings):
        with LLM("tiny-qwen3", **TINY, **more) as llm:
            out = llm.generate(several, options, use_tqdm=False)
            found.append([[sample.token_ids for sample in o.outputs] for o in out])
            hit = llm.engine.block_manager.num_hit_tokens
    assert found[0] == found[1]
    assert hit == 6 * 96 + 2 * 48 + 3 * 96 + 64  # of all samples but the very first


def test_every_sampling_option_goes_with_graphs_and_overlap():
    several = [
        SamplingParams(top_k=5, seed=1, max_tokens=9),
        SamplingParams(top_p=0.8, min_p=0.01, seed=2, max_tokens=9, logprobs=3),
        SamplingParams(repetition_penalty=1.3, temperature=0, max_tokens=9),
        SamplingParams(min_tokens=5, seed=4, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=9),
    ]
    found = []
    for settings in (dict(overlap=0, enforce_eager=True, fused_kernels=False, attention="torch"), {}, dict(overlap=0)):
        with LLM("tiny-qwen3", **TINY, **settings) as llm:
            out = llm.generate(prompts(5), several, use_tqdm=False)
            found.append([(o.token_ids, o.logprobs and [sorted(e) for e in o.logprobs]) for o in out])
    assert found[0] == found[1] == found[2]


def test_an_end_token_in_flight_ends_the_request():
    with LLM("tiny-qwen3", overlap=0, **TINY) as llm:
        free = [out.token_ids for out in llm.generate(prompts(8), params(8), use_tqdm=False)]
        stops = [sorted({ids[2], ids[4]}) for ids in free]
        stopping = [SamplingParams(temperature=0.8 * (i % 3 > 0), seed=i, max_tokens=10, stop_token_ids=stop)
                    for i, stop in enumerate(stops)]  # fmt: skip
        wanted = [(o.token_ids, o.finish_reason) for o in llm.generate(prompts(8), stopping, use_tqdm=False)]
    with LLM("tiny-qwen3", **TINY) as llm:
        assert llm.engine.overlap == 1
        assert wanted == [(o.token_ids, o.finish_reason) for o in llm.generate(prompts(8), stopping, use_tqdm=False)]
        assert {reason for _, reason in wanted} == {"stop"}


def test_abort_in_flight_gives_the_blocks_back():
    with LLM("tiny-qwen3", **TINY) as llm:
        engine, manager = llm.engine, llm.engine.block_manager
        seqs = [engine.add_request([1, 2, 3, i], SamplingParams(max_tokens=50, ignore_eos=True)) for i in range(4)]
        for _ in range(5):
            engine.step()
        assert engine.in_flight
        engine.abort(seqs[1])
        for _ in range(3):
            engine.step()
            manager.check_invariants(engine.sequences.values())
        for seq in seqs:
            engine.abort(seq)
        while engine.has_unfinished():
            engine.step()
        assert manager.num_free_blocks == manager.num_blocks


@pytest.mark.parametrize("options", [{}, dict(top_p=0.9, top_k=40, min_p=0.01)])
def test_a_step_is_launched_without_waiting_for_the_gpu(options):
    with LLM("tiny-qwen3", **TINY) as llm:
        for i in range(5):
            params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=i % 2, **options)
            llm.engine.add_request([1, 2, 3, i], params)
        for _ in range(4):
            llm.engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for i in range(40):
                if i % 10 == 5:  # a prompt between them: a mixed step
                    llm.engine.add_request([5, 6, 7, i], SamplingParams(max_tokens=200, ignore_eos=True, **options))
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_is_measured_respected_and_given_back():
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    half = 0.45 + (total - free) / total
    with LLM("qwen3-0.6b", load_format="dummy", max_model_len=4096, gpu_memory_utilization=half) as first:
        in_use = total - torch.cuda.mem_get_info()[0]
        assert 0.8 * half < in_use / total < half + 0.02
        with LLM("tiny-qwen3", load_format="dummy", gpu_memory_utilization=half + 0.2) as second:
            assert tokens(second, 3)
        assert tokens(first, 3)
        with pytest.raises(RuntimeError, match=r"GiB are missing.*gpu_memory_utilization"):
            LLM("qwen3-0.6b", load_format="dummy", gpu_memory_utilization=half)
        assert tokens(first, 3)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - 2 * GIB  # compiled kernels and matrix-product workspaces stay
    with LLM("qwen3-0.6b", load_format="dummy", max_model_len=4096) as again:
        assert tokens(again, 2)


def test_the_largest_batch_fits_in_what_was_measured():
    with LLM("qwen3-0.6b", load_format="dummy", max_model_len=4096, max_num_batched_tokens=16384) as llm:
        many = [dict(prompt_token_ids=[i % 1000] * 1000) for i in range(256)]
        dear = SamplingParams(top_p=0.9, top_k=40, max_tokens=3, ignore_eos=True, logprobs=2)
        assert all(len(out.token_ids) == 3 for out in llm.generate(many, dear, use_tqdm=False))


def test_named_backends_and_block_sizes():
    with pytest.raises(ValueError, match="triton.*block_size=8"):
        LLM("tiny-qwen3", attention="triton", block_size=8, load_format="dummy")
    with LLM("tiny-qwen3", block_size=8, **TINY) as llm:
        assert llm.engine.runner.attention.name == "torch"


def test_flash_by_name_wants_its_block_size():
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    with pytest.raises(ValueError, match="flash.*block_size=48"):
        LLM("smollm2-135m", load_format="dummy", attention="flash", block_size=48)
    with LLM("smollm2-135m", load_format="dummy", attention="flash", max_model_len=256, num_blocks=20) as llm:
        assert llm.engine.block_manager.block_size == 256
