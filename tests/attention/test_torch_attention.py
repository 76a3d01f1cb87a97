"""Paged attention against plain dense attention: float64, heads expanded, an explicit mask, one row at a time."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanoengine.attention import choose_backend
from nanoengine.attention.torch_attention import TorchAttention, gather
from nanoengine.engine.batch import build_batch
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams

HEADS = [(9, 3), (16, 8), (8, 2), (4, 1), (5, 5)]
# (tokens with KV before, new tokens): decode, chunks, whole prompts, and lengths around block edges
MIXED = [(37, 1), (0, 20), (16, 16), (0, 1), (1, 1), (7, 9), (255, 2), (256, 1), (15, 33), (6, 1)]
CPU = torch.device("cpu")


class Case:
    """Rows with random K and V; the blocks of each lie scattered in a pool filled with NaN."""

    def __init__(self, rows, heads, kv_heads, dim, block_size, dtype=torch.float32, seed=0):
        rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
        self.block_size, self.scale = block_size, dim**-0.5
        totals = [before + new for before, new in rows]
        blocks = [-(-total // block_size) for total in totals]
        ids = list(range(sum(blocks) + 3))
        rng.shuffle(ids)
        self.seqs, self.kv = [], []
        self.cache = torch.full((2, len(ids), block_size, kv_heads, dim), math.nan, dtype=dtype)
        for i, ((before, new), n) in enumerate(zip(rows, blocks, strict=True)):
            seq = Sequence(i, [0] * (before + new), SamplingParams(), max_total_tokens=10**9)
            seq.num_computed_tokens, seq.num_scheduled_tokens = before, new
            seq.block_table = [ids.pop() for _ in range(n)]
            kv = torch.randn(2, before + new, kv_heads, dim, generator=gen, dtype=dtype)
            for p in range(before):
                self.cache[:, seq.block_table[p // block_size], p % block_size] = kv[:, p]
            self.seqs.append(seq)
            self.kv.append(kv)
        self.batch = build_batch(self.seqs, block_size)
        self.q = torch.randn(sum(new for _, new in rows), heads, dim, generator=gen, dtype=dtype)
        self.k, self.v = torch.cat([kv[:, before:] for kv, (before, _) in zip(self.kv, rows, strict=True)], 1)

    def run(self):
        backend = TorchAttention()
        metadata = backend.prepare(self.batch, self.block_size, CPU)
        return backend(self.q, self.k, self.v, self.cache, metadata, self.scale)

    def expected(self) -> torch.Tensor:
        outputs, first = [], 0
        for seq, kv in zip(self.seqs, self.kv, strict=True):
            new, before = seq.num_scheduled_tokens, seq.num_computed_tokens
            outputs.append(dense(self.q[first : first + new], *kv, before, self.scale))
            first += new
        return torch.cat(outputs)


def dense(q, k, v, before: int, scale: float) -> torch.Tensor:
    """softmax(q k^T * scale + mask) v with every KV head copied for its query heads."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    later = torch.arange(len(k)) > before + torch.arange(len(q))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_equals_dense_attention(heads, kv_heads, dim, block_size):
    case = Case(MIXED, heads, kv_heads, dim, block_size)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_formats(dtype):
    case = Case(MIXED, 8, 2, 64, 16, dtype)
    out = case.run()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), case.expected(), atol=0.03, rtol=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_random_rows(seed):
    rng = random.Random(seed)
    rows = [(rng.choice([0, 0, rng.randrange(60)]), rng.choice([1, 1, rng.randrange(1, 40)])) for _ in range(8)]
    case = Case(rows, *rng.choice(HEADS), rng.choice([32, 80]), rng.choice([1, 2, 3, 5, 16, 64]), seed=seed)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=3e-6, rtol=1e-5)


def test_strided_inputs_as_the_decoder_makes_them():
    """q, k and v are views into one product: nothing may rely on their being contiguous."""
    case = Case(MIXED, 9, 3, 64, 16)
    want = case.run()
    packed = torch.cat((case.q, case.k, case.v), 1)
    case.q, case.k, case.v = packed.split((9, 3, 3), 1)
    assert not case.q.is_contiguous()
    torch.testing.assert_close(case.run(), want, atol=0, rtol=0)


def test_scale_is_an_argument():
    case = Case(MIXED, 4, 2, 32, 16)
    case.scale = 0.5
    torch.testing.assert_close(case.run().double(), case.expected(), atol=3e-6, rtol=1e-5)


def test_large_scores_do_not_overflow():
    case = Case(MIXED, 4, 2, 32, 16)
    case.q *= 1000
    assert torch.isfinite(case.run()).all()


# what is written


def test_every_new_token_is_written_to_its_slot_and_nothing_else():
    case = Case(MIXED, 8, 2, 64, 7)
    before = case.cache.clone()
    case.run()
    flat, old = case.cache.flatten(1, 2), before.flatten(1, 2)
    slots = torch.from_numpy(case.batch.slot_mapping)
    assert torch.equal(flat[0, slots], case.k) and torch.equal(flat[1, slots], case.v)
    others = torch.ones(flat.shape[1], dtype=torch.bool)
    others[slots] = False
    assert torch.equal(flat[:, others].nan_to_num(9e9), old[:, others].nan_to_num(9e9))


@pytest.mark.parametrize("padded", [[1], [0, 2], [0, 1, 2, 3]])
def test_slot_minus_one_writes_nowhere(padded):
    """Not to block 0 and not to the last slot, which is where index -1 would go."""
    cache = torch.arange(2 * 3 * 4 * 1 * 8, dtype=torch.float32).view(2, 3, 4, 1, 8)
    before = cache.clone()
    slots = np.array([4, 5, 6, 7], np.int64)
    slots[padded] = -1
    batch = SimpleNamespace(query_lens=np.ones(4, np.int64), context_lens=np.ones(4, np.int64),
                            block_tables=[[1], [1], [1], [1]], slot_mapping=slots)  # fmt: skip
    q, k, v = torch.randn(4, 2, 8), torch.randn(4, 1, 8), torch.randn(4, 1, 8)
    backend = TorchAttention()
    backend(q, k, v, cache, backend.prepare(batch, 4, CPU), 1.0)
    for row in range(4):
        want = before[:, 1, row] if row in padded else torch.stack((k[row], v[row]))
        assert torch.equal(cache[:, 1, row], want)
    assert torch.equal(cache[:, [0, 2]], before[:, [0, 2]])


# what is read


@pytest.fixture
def calls(monkeypatch):
    """Each call of F.scaled_dot_product_attention as (query, key, value, mask)."""
    seen, real = [], F.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, **kwargs):
        seen.append((q, k, v, attn_mask))
        return real(q, k, v, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


def test_nothing_is_padded_to_the_longest_row(calls):
    """One row of 1,000 tokens among ten short ones: queries times keys is the sum over rows, no more."""
    rows = [(1000, 1), (0, 50), *itertools.repeat((3, 1), 10)]
    case = Case(rows, 8, 2, 64, 16)
    case.run()
    pairs = [math.prod(q.shape[:-1]) // 2 * k.shape[-2] for q, k, *_ in calls]  # of one KV head
    group = 4
    assert sum(pairs) == sum(group * new * (before + new) for before, new in rows)
    keys = sum(k.shape[-2] for _, k, *_ in calls)
    assert keys == sum(before + new for before, new in rows)


def test_kv_heads_are_not_copied(calls):
    """A KV head is stored once: as many heads as there are, or a group axis of stride 0."""
    case = Case(MIXED, 16, 4, 64, 16)
    case.run()
    assert len(calls) == len(MIXED)
    for _, k, v, _ in calls:
        for x in (k, v):
            stored = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
            assert math.prod(stored) == x.shape[-2] * 4 * 64


def test_gathering_touches_the_rows_own_blocks_only():
    """Cost of a decode row is its context, not the pool's size."""
    cache = torch.randn(1000, 4, 1, 8)
    row = SimpleNamespace(blocks=torch.tensor([7, 3, 999]), context=10)
    got = gather(cache, row)
    assert got.shape == (10, 1, 8)
    assert torch.equal(got, torch.cat((cache[7], cache[3], cache[999]))[:10])


def test_on_a_cpu_torch_is_chosen():
    assert choose_backend("auto", CPU).name == choose_backend("torch", CPU).name == "torch"
    assert TorchAttention.default_block_size == 16
    with pytest.raises(ValueError, match="attention.*'nonsense'"):
        choose_backend("nonsense", CPU)


def test_no_call_falls_back_to_a_kernel_that_copies_heads(calls):
    """torch's fused CPU kernel reads stride 0 as it is; its fallback would write each KV head out per query head."""
    Case(MIXED, 8, 2, 64, 16).run()
    for q, k, v, mask in calls:
        fused = torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[-2] == k.shape[-2])
        assert fused == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
