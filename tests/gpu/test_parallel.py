"""Two GPUs against one: the same logits with graphs, overlap and all backends; half the bytes; a killed rank.

`pytest tests/gpu/test_parallel.py` is the whole GPU run but for the figures (`nanoengine bench tp --json FILE`).
"""

import os
import signal
import threading
import time

import psutil
import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.trace import record
from tests.gpu.forced import compare, forced_logits, largest_error, texts, weights_rounded_to
from tests.gpu.test_engine import params, prompts, tokens

PROMPT = 80
WAYS = {
    "plain": dict(attention="torch", fused_kernels=False, enforce_eager=True, overlap=0),
    "kernels, eager": dict(attention="triton", enforce_eager=True),
    "graphs": dict(attention="triton"),
    "graphs, no overlap": dict(attention="triton", overlap=0),
    "flash": dict(attention="flash"),
    "chunked": dict(max_num_batched_tokens=48),
    "preempted": dict(num_blocks=40, watermark=0.0),
    "cached": dict(rounds=2),
}
BOUNDS = {"float32": 1e-3, "bfloat16": 0.06}
SMALL = dict(load_format="dummy", max_model_len=256, dtype="float32", num_blocks=400)


# a mark, not a fixture: fixtures of the whole module would run before it
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 CUDA GPUs")


@pytest.mark.parametrize("way", ["kernels, eager", "graphs", "graphs, no overlap"])
def test_nonfinite_logits_end_one_request_on_two_gpus(way):
    """NaN in the first GPU's part of the embedding: the sum over the ranks takes it to both."""
    bad, mates = [3, 100, 4] * 8, [[1, 5, 7] * 8, [9, 8] * 12]
    made = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=9, ignore_eos=True) for i in range(3)]
    with LLM("tiny-llama", tensor_parallel_size=2, **SMALL, **WAYS[way]) as llm:
        wanted = llm.generate(mates, made[:2], use_tqdm=False)
        llm.engine.runner.model.embed_tokens.weight.data[100] = float("nan")
        llm.engine.block_manager.reset()
        first, second, out = llm.generate([*mates, bad], made, use_tqdm=False)
        assert (out.finish_reason, out.token_ids) == ("error", [])
        assert [first.token_ids, second.token_ids] == [out.token_ids for out in wanted]
        again = llm.generate(mates, made[:2], use_tqdm=False)
        assert [out.token_ids for out in again] == [out.token_ids for out in wanted]


@pytest.fixture(scope="module")
def one_gpu():
    return {dtype: reference("qwen3-0.6b", dtype) for dtype in BOUNDS}


def reference(model, dtype):
    """The texts, and one GPU's logits in float32: what both formats are held against (bfloat16 with its own weights).

    Against one GPU in bfloat16 both sides would have errors, and different ones: sums over two ranks are rounded
    otherwise."""
    wanted = texts(3, PROMPT + 190)  # beyond a block of flash-attn's, 256 tokens
    with weights_rounded_to(getattr(torch, dtype)):
        return wanted, forced_logits(model, wanted, PROMPT, dtype="float32", **WAYS["plain"])[0]


def held_against(model, dtype, wanted, logits, bound, **settings):
    """(facts, share of steps that were compared by their argmax)"""
    found, facts = forced_logits(model, wanted, PROMPT, dtype=dtype, tensor_parallel_size=2, **settings)
    assert len(found) >= 512
    worst, share = compare(found, logits, bound)
    print(f"{model}, {dtype}, {settings}: largest error {worst:.4f}, bound {bound:.4f}, compared {share:.0%}, {facts}")
    return facts, share


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_one_gpu(way, dtype, one_gpu):
    if WAYS[way].get("attention") == "flash":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
        if dtype == "float32":
            return  # flash-attn has none
    facts, share = held_against("qwen3-0.6b", dtype, *one_gpu[dtype], BOUNDS[dtype], **WAYS[way])
    assert share >= 0.5
    assert facts["preemptions"] or way != "preempted"
    assert facts["cached"] or way != "cached"


def test_logits_of_a_larger_model():
    """8 billion parameters, graphs on: float32 as one GPU has it, bfloat16 no further from float32 than one GPU is.

    (Random weights of 36 wide layers make a logit that bfloat16 cannot hold to 0.06: what it can, one GPU tells.)
    """
    size = dict(num_blocks=100)
    facts, share = held_against("qwen3-8b", "float32", *reference("qwen3-8b", "float32"), 2e-3, **size)
    assert share >= 0.5 and facts["backend"] == "triton"
    wanted, logits = reference("qwen3-8b", "bfloat16")
    one = largest_error(forced_logits("qwen3-8b", wanted, PROMPT, dtype="bfloat16", **size)[0], logits)
    held_against("qwen3-8b", "bfloat16", wanted, logits, 1.5 * one, **size)


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-llama"])
def test_tokens_at_every_batch_size_with_graphs(model):
    plain = dict(attention="torch", fused_kernels=False, overlap=0, enforce_eager=True)
    with LLM(model, max_num_seqs=21, **plain, **SMALL) as one:
        wanted = tokens(one, 21)
    with LLM(model, max_num_seqs=21, tensor_parallel_size=2, **SMALL) as llm:
        assert llm.engine.overlap == 1
        for n in range(1, 22):
            with record(llm) as trace:
                assert tokens(llm, n) == wanted[:n], n
            assert any(step["graph_bucket"] for step in trace)


def test_sampling_options():
    several = [SamplingParams(top_k=5, seed=1, max_tokens=9),
               SamplingParams(top_p=0.8, seed=2, max_tokens=9, logprobs=3),
               SamplingParams(repetition_penalty=1.3, temperature=0, max_tokens=9)]  # fmt: skip
    found = []
    for size in (1, 2):
        with LLM("tiny-qwen3", tensor_parallel_size=size, **SMALL) as llm:
            out = llm.generate(prompts(3), several, use_tqdm=False)
            found.append([(o.token_ids, o.logprobs and [sorted(e) for e in o.logprobs]) for o in out])
    assert found[0] == found[1]


def test_memory_of_each_rank():
    """Half of the weights, a KV pool of the same number of blocks, and about twice as many as one GPU has room for."""
    settings = dict(load_format="dummy", max_model_len=40960, gpu_memory_utilization=0.5, max_num_seqs=512)
    with LLM("qwen3-8b", **settings) as llm:
        whole = sum(parameter.nbytes for parameter in llm.engine.runner.model.parameters())
        blocks = llm.engine.runner.num_blocks
    with LLM("qwen3-8b", tensor_parallel_size=2, **settings) as llm:
        first, second = llm.engine.runner.facts
        assert first.kv_bytes == second.kv_bytes and first.pid != second.pid
        for fact in (first, second):
            assert 0.5 * whole <= fact.weight_bytes < 0.51 * whole
        assert llm.engine.runner.num_blocks > 2 * blocks
        assert tokens(llm, 3)


@pytest.mark.parametrize("settings", [{}, dict(enforce_eager=True), dict(overlap=0)])
def test_kill_9_of_rank_1(settings):
    """In the middle of a call, NCCL kernels in flight: an error within 30 s, nothing left, and a new engine works."""
    endless = SamplingParams(max_tokens=200, ignore_eos=True)
    llm = LLM("tiny-qwen3", tensor_parallel_size=2, **SMALL | settings)
    rank = llm.engine.runner.facts[1].pid
    began, killed = time.monotonic(), []

    def kill():
        killed.append(time.monotonic())
        os.kill(rank, signal.SIGKILL)

    threading.Timer(1.0, kill).start()
    with pytest.raises(RuntimeError, match=rf"rank 1 \(process {rank}\) was killed by SIGKILL"):
        while time.monotonic() - began < 60:
            llm.generate([[1, 2, 3]] * 8, endless, use_tqdm=False)
    assert time.monotonic() - killed[0] < 30
    assert not psutil.pid_exists(rank)
    llm.close()
    assert time.monotonic() - killed[0] < 45
    with LLM("tiny-qwen3", tensor_parallel_size=2, **SMALL) as again:
        assert tokens(again, 3)


def test_two_engines_and_the_second_outlives_the_first():
    with LLM("tiny-llama", tensor_parallel_size=2, **SMALL) as first:
        with LLM("tiny-llama", tensor_parallel_size=2, **SMALL) as second:
            wanted = tokens(first, 4)
            assert tokens(second, 4) == wanted == tokens(first, 4)
        assert tokens(first, 4) == wanted


def test_a_step_is_launched_without_waiting_for_the_gpu():
    with LLM("tiny-qwen3", tensor_parallel_size=2, **SMALL) as llm:
        for i, p in zip(range(5), params(5), strict=True):
            llm.engine.add_request([1, 2, 3, i], SamplingParams(max_tokens=200, ignore_eos=True, seed=p.seed))
        for _ in range(4):
            llm.engine.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(40):
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_sampling_options_on_two_ranks():
    """Logits of the prompt are gathered in parts, beside steps that both ranks replay."""
    from tests.gpu.test_sampling_options import PLAIN, assert_same, outputs

    wanted = outputs(**PLAIN)
    assert_same(outputs(tensor_parallel_size=2), wanted)
    assert_same(outputs(tensor_parallel_size=2, max_num_batched_tokens=33), wanted)
