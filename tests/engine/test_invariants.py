"""check_invariants() notices each kind of damage: without this, the random walks would prove nothing."""

from __future__ import annotations

import pytest

from nanoengine.engine.block_manager import BlockManager

from .helpers import cached


def broken(change):
    m = BlockManager(8, 2)
    seq = cached(m, [1, 1, 2, 2, 5])
    change(m, seq)
    return m, seq


def _leak(m, seq):
    seq.block_table = seq.block_table[:1]
    seq.capacity = 2


def _double_free(m, seq):
    m.free_blocks[seq.block_table[0]] = None


def _lost_free(m, seq):
    m.free_blocks.popitem()


def _twice_in_table(m, seq):
    seq.block_table[1] = seq.block_table[0]


def _wrong_ref(m, seq):
    m.ref_counts[seq.block_table[0]] += 1


def _writes_cached(m, seq):
    seq.num_computed_tokens = 1


def _capacity(m, seq):
    seq.capacity += 1


def _stale_map(m, seq):
    next(iter(m._contents.values())).blocks.clear()


def _stale_block(m, seq):
    m._content_of[seq.block_table[0]] = None


def _dead_content(m, seq):
    m._contents.popitem()


@pytest.mark.parametrize(
    "change",
    [_leak, _double_free, _lost_free, _twice_in_table, _wrong_ref, _writes_cached, _capacity, _stale_map,
     _stale_block, _dead_content],
)  # fmt: skip
def test_check_invariants_notices(change):
    m, seq = broken(change)
    with pytest.raises(AssertionError):
        m.check_invariants([seq])
