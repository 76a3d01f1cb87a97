"""Every backend and every way through the engine against Hugging Face, teacher-forced over 512 tokens and more."""

import pytest
import torch

from tests.gpu.forced import compare, forced_logits, huggingface_logits, texts

PROMPT = 80
WAYS = {
    "torch": dict(attention="torch"),
    "flash, eager": dict(attention="flash", enforce_eager=True),
    "flash": dict(attention="flash"),
    "triton, eager": dict(attention="triton", enforce_eager=True),
    "triton, plain layers": dict(attention="triton", fused_kernels=False),
    "triton": dict(attention="triton"),
    "triton, blocks of 48": dict(attention="triton", block_size=48),
    "chunked": dict(max_num_batched_tokens=48),
    "preempted": dict(num_blocks=40, watermark=0.0),
    "cached": dict(rounds=2),
    "no overlap": dict(overlap=0),
    "prefill first": dict(policy="prefill_first"),
}


@pytest.fixture(scope="module")
def reference():
    if not torch.cuda.is_available():
        return {}
    wanted = texts(3, PROMPT + 190)  # beyond a block of flash-attn's, 256 tokens
    return {dtype: (wanted, huggingface_logits("qwen3-0.6b", wanted, PROMPT, dtype))
            for dtype in (torch.bfloat16, torch.float32)}  # fmt: skip


def run(way, dtype, reference, bound):
    settings = WAYS[way]
    if settings.get("attention") == "flash":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    wanted, logits = reference[getattr(torch, dtype)]
    found, facts = forced_logits("qwen3-0.6b", wanted, PROMPT, dtype=dtype, **settings)
    assert len(found) >= 512
    worst, share = compare(found, logits, bound)
    print(f"{way}, {dtype}: largest error {worst:.4f}, compared {share:.0%}, {facts}")
    assert share >= 0.5
    if way == "preempted":
        assert facts["preemptions"]
    if way == "cached":
        assert facts["cached"]
    return facts


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_is_near_float32(way, reference):
    facts = run(way, "bfloat16", reference, 0.06)
    assert facts["block_size"] == {"flash": 256}.get(facts["backend"], WAYS[way].get("block_size", 16))


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("flash")])
def test_float32_is_equal(way, reference):
    run(way, "float32", reference, 1e-3)


def test_float16(reference):
    """The format of cards without bfloat16; weights are those of the bfloat16 model, rounded once more."""
    wanted, _ = reference[torch.bfloat16]
    found, _ = forced_logits("qwen3-0.6b", wanted, PROMPT, dtype="float16")
    plain, _ = forced_logits("qwen3-0.6b", wanted, PROMPT, dtype="float16", attention="torch", fused_kernels=False,
                             enforce_eager=True)  # fmt: skip
    assert compare(found, plain, 0.02)[1] >= 0.5
