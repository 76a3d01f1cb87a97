"""Paged attention and the store, against their torch references, on ragged rows and odd sizes."""

import numpy as np
import pytest
import torch

from nanoengine.kernels.kv_splits import (
    combine_kv_splits,
    combine_kv_splits_reference,
    plan_kv_splits,
)
from nanoengine.kernels.paged_decode import Tuning, paged_decode, paged_decode_reference
from nanoengine.kernels.paged_prefill import (
    paged_prefill,
    paged_prefill_reference,
    plan_tiles,
    queries_per_tile,
)
from nanoengine.kernels.store_kv import store_kv, store_kv_reference

POISON = 1e4


def pool(device, contexts, block_size, kv_heads, d, dtype=torch.float32, seed=0):
    """A cache whose unused slots are NaN, and block tables in random order with lines for other sequences."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-c // block_size) for c in contexts]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    cache = torch.full((2, num_blocks, block_size, kv_heads, d), float("nan"))
    tables = torch.zeros(len(contexts) + 2, max(needed) + 1, dtype=torch.int32)
    rows = torch.randperm(len(contexts) + 2, generator=generator)[: len(contexts)]
    for row, context, n in zip(rows.tolist(), contexts, needed, strict=True):
        blocks = [order.pop() for _ in range(n)]
        tables[row, :n] = torch.tensor(blocks)
        slots = [blocks[p // block_size] * block_size + p % block_size for p in range(context)]
        cache.view(2, -1, kv_heads, d)[:, slots] = torch.randn(2, context, kv_heads, d, generator=generator)
    return cache.to(device, dtype), tables.to(device), rows.to(device), generator


def close(found, wanted, dtype):
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype], float(error)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "block_size", "dtype"),
    [
        (9, 3, 64, 16, torch.float32),
        (4, 2, 128, 16, torch.float16),
        (2, 2, 96, 24, torch.float32),
        (4, 1, 64, 256, torch.float16),
        (40, 2, 64, 17, torch.float32),
    ],
)
@pytest.mark.parametrize("extra", [0, 5])
def test_decode(device, heads, kv_heads, d, block_size, dtype, extra):
    contexts = [1, 33, 150, 64]
    cache, tables, rows, generator = pool(device, contexts, block_size, kv_heads, d, dtype)
    q = torch.randn(7, heads, d, generator=generator).to(device, dtype)
    tokens = torch.tensor([5, 0, 3, 2], device=device)
    plan = plan_kv_splits(np.array(contexts), np.arange(4), extra)
    kv_splits, combined = (torch.from_numpy(x).to(device) for x in plan)
    assert kv_splits.shape[1] == 4 + extra
    out = torch.full_like(q, POISON)
    paged_decode(q, cache, tables, rows, tokens, kv_splits, combined, out, 0.1)
    close(out[tokens], paged_decode_reference(q[tokens], cache, tables[rows], torch.tensor(contexts), 0.1), dtype)
    untouched = [i for i in range(7) if i not in tokens.tolist()]
    assert (out[untouched] == POISON).all()


def test_decode_of_a_row_in_more_kv_splits_than_are_combined_at_a_time(device):
    cache, tables, rows, generator = pool(device, [700], 16, 2, 32)
    q, token = torch.randn(1, 4, 32, generator=generator).to(device), torch.zeros(1, dtype=torch.int64, device=device)
    plan = plan_kv_splits(np.array([700]), np.arange(1), 31)
    kv_splits, combined = (torch.from_numpy(x).to(device) for x in plan)
    assert combined[2].max() > 16
    out = torch.empty_like(q)
    paged_decode(q, cache, tables, rows, token, kv_splits, combined, out, 0.1)
    close(out, paged_decode_reference(q, cache, tables[rows], torch.tensor([700]), 0.1), torch.float32)


def test_partial_results_are_combined_by_their_softmax_sums(device):
    partial_out, lse = torch.randn(9, 4, 24, device=device), 5 * torch.randn(9, 4, device=device)
    combined = torch.tensor([[2, 0, 0], [0, 7, 0], [7, 2, 0]], device=device)
    starts = torch.tensor([4, 0, 1], device=device)
    found, wanted = (torch.full((5, 4, 24), POISON, device=device) for _ in range(2))
    combine_kv_splits(partial_out, lse, starts, combined, found)
    combine_kv_splits_reference(partial_out, lse, starts, combined, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert (found[[0, 2, 3]] == POISON).all()


def test_kv_splits_cover_every_key_once_and_are_never_more_than_allowed():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(1, 20))
        seq_lens, rows = rng.integers(1, 3000, n), rng.permutation(50)[:n]
        extra, more = int(rng.integers(0, 40)), int(rng.integers(0, 3))
        kv_splits, combined = plan_kv_splits(seq_lens, rows, extra, n + more)
        assert (kv_splits.shape, combined.shape) == ((4, n + more + extra), (3, extra))
        splits = [tuple(map(int, split)) for split in kv_splits.T if split[0] >= 0]
        several = {int(row): (int(first), int(count)) for row, first, count in combined.T if count}
        for row, seq_len in zip(rows, seq_lens, strict=True):
            own = sorted((a, b, number) for r, a, b, number in splits if r == row)
            first, count = several.get(int(row), (0, 1))
            assert own[0][0] == 0 and own[-1][1] == seq_len
            assert all(left[1] == right[0] for left, right in zip(own, own[1:], strict=False))
            numbers = [-1] if count == 1 else list(range(first, first + count))
            assert [number for *_, number in own] == numbers
            assert all((b - a) % Tuning.tile == 0 for a, b, _ in own[:-1])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "block_size", "dtype"),
    [(9, 3, 64, 16, torch.float32), (4, 2, 128, 16, torch.float16), (2, 2, 96, 40, torch.float32)],
)
def test_prefill_of_ragged_rows(device, heads, kv_heads, d, block_size, dtype):
    """A whole prompt, a chunk with earlier context, a decode row, a prompt longer than a tile."""
    query_lens, context_lens = np.array([20, 5, 1, 150]), np.array([20, 77, 90, 150])
    cache, tables, rows, generator = pool(device, context_lens.tolist(), block_size, kv_heads, d, dtype)
    q = torch.randn(int(query_lens.sum()), heads, d, generator=generator).to(device, dtype)
    starts = np.cumsum(query_lens) - query_lens
    chosen = np.array([0, 1, 3])  # the decode row is left to the other kernel
    tiles = torch.from_numpy(plan_tiles(query_lens, context_lens, chosen, queries_per_tile(heads // kv_heads)))
    out = torch.full_like(q, POISON)
    sizes = [torch.from_numpy(x).to(device) for x in (starts, query_lens, context_lens)]
    paged_prefill(q, cache, tables, rows, *sizes, tiles.to(device), out, 0.1)
    wanted = paged_prefill_reference(q, cache, tables[rows], *sizes, 0.1)
    decode = int(starts[2])
    assert (out[decode] == POISON).all()
    out[decode] = wanted[decode]
    close(out, wanted, dtype)


@pytest.mark.parametrize(("kv_heads", "d"), [(3, 64), (8, 128), (2, 96)])
def test_store_skips_padded_rows_and_takes_strided_parts(device, kv_heads, d):
    qkv = torch.randn(5, 4 + 2 * kv_heads, d, device=device)
    _, k, v = qkv.split((4, kv_heads, kv_heads), 1)
    slots = torch.tensor([3, -1, 31, 0, -1], device=device)
    found, wanted = (torch.zeros(2, 4, 8, kv_heads, d, device=device) for _ in range(2))
    store_kv(k, v, found, slots)
    store_kv_reference(k, v, wanted, slots)
    assert torch.equal(found, wanted)
    assert found.view(2, 32, -1).abs().sum(-1).count_nonzero() == 6


def test_a_kernel_that_leaves_its_tensors_is_caught(device):
    """The check of tests/kernels/bounds.py itself: a slot beyond the cache."""
    if device.type == "cuda":
        return
    k, cache = torch.randn(1, 2, 64), torch.zeros(2, 4, 16, 2, 64)
    store_kv(k, k, cache, torch.tensor([63]))
    with pytest.raises(Exception, match="_store_kv: 128 of 128 stores are outside"):
        store_kv(k, k, cache, torch.tensor([64 + 64]))
