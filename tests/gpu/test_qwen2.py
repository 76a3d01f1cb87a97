"""Qwen2, whose q, k and v have a bias: every way through the engine against Hugging Face, teacher-forced."""

import pytest
import torch

from tests.gpu.forced import compare, forced_logits, huggingface_logits, large_biases, texts

NAME, PROMPT = "qwen2.5-0.5b", 80
WAYS = {
    "graphs": dict(),
    "no graphs": dict(enforce_eager=True),
    "graphs, plain layers": dict(fused_kernels=False),
    "torch": dict(attention="torch"),
    "chunked": dict(max_num_batched_tokens=48),
    "one at a time": dict(max_num_seqs=1),  # the kernels for one token
    "no overlap": dict(overlap=0),
}
BOUNDS = {"bfloat16": 0.06, "float32": 2e-3}


@pytest.fixture(scope="module")
def reference():
    if not torch.cuda.is_available():
        return {}
    wanted = texts(3, PROMPT + 190)
    with large_biases():
        return {
            dtype: (wanted, huggingface_logits(NAME, wanted, PROMPT, getattr(torch, dtype)))
            for dtype in BOUNDS
        }


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("way", WAYS)
def test_qwen2_has_the_logits_of_transformers(way, dtype, reference):
    wanted, logits = reference[dtype]
    with large_biases():
        found, facts = forced_logits(NAME, wanted, PROMPT, dtype=dtype, **WAYS[way])
    assert len(found) >= 512
    worst, share = compare(found, logits, BOUNDS[dtype])
    print(f"{way}, {dtype}: largest error {worst:.4f}, compared {share:.0%}, {facts}")
    assert share >= 0.5


def test_qwen2_without_its_biases_is_seen(reference):
    """The comparison can fail: biases that are twenty times smaller."""
    wanted, logits = reference["float32"]
    found, _ = forced_logits(NAME, wanted[:1], PROMPT, dtype="float32")
    assert (
        max(float((row - logits[key]).abs().max()) for key, row in found.items())
        > 10 * BOUNDS["float32"]
    )
