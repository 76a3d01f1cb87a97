"""Request rows: who holds one, when it may be used again, what is sent of a block table."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine.engine.batch import build_batch
from nanoengine.engine.rows import RowTable, SentBlocks, TableUpdate
from nanoengine.engine.sequence import Status

from .helpers import add, done, engine, sequence


def running(seq_id: int):
    seq = sequence([1], seq_id)
    seq.status = Status.RUNNING
    return seq


def test_a_running_sequence_keeps_its_row_and_a_new_one_gets_another():
    rows, a, b = RowTable(4), running(0), running(1)
    assert rows.assign([a, b]) == [True, True] and a.row != b.row
    kept = a.row
    assert rows.assign([a]) == [] and a.row == kept and rows.held_by(kept) is a


def test_an_ended_sequence_holds_its_row_until_its_last_step_has_landed():
    rows, old = RowTable(1), running(0)
    rows.assign([old])
    old.status, old.num_in_flight = Status.FINISHED, 1
    new = running(1)
    with pytest.raises(RuntimeError, match="max_num_seqs"):
        rows.assign([new])
    old.num_in_flight = 0
    assert rows.assign([new]) == [True] and rows.held_by(new.row) is new


def test_a_restarted_sequence_gets_a_new_row():
    rows, seq = RowTable(2), running(0)
    rows.assign([seq])
    seq.restart()
    assert seq.row == -1 and rows.held_by(0) is None
    seq.status = Status.RUNNING
    assert rows.assign([seq]) == [True]


def test_a_row_is_reused_only_after_what_ended_in_flight_has_landed():
    """Two run, both end while the step after is in flight, and two come in their place."""
    eng = engine(40, 4, max_num_seqs=2, overlap=1, hold_back=True)
    seqs = [add(eng, [k, k + 1], max_tokens=2 + k % 3) for k in range(12)]
    done(eng, seqs)
    assert max(seq.row for seq in seqs) < 4


def step(*seqs, new):
    for seq in seqs:
        seq.num_scheduled_tokens = 1
    return build_batch(list(seqs), 4, new)


def test_what_is_sent_is_what_is_new():
    sent, a, b = SentBlocks(), running(0), running(1)
    a.row, b.row, a.block_table, b.block_table = 3, 0, [7, 8], [1]
    assert sent.updates(step(a, b, new=[True, True])) == [
        TableUpdate(3, 0, [7, 8]),
        TableUpdate(0, 0, [1]),
    ]
    assert sent.updates(step(b, a, new=[False, False])) == []
    a.block_table.append(9)
    assert sent.updates(step(a, new=[False])) == [TableUpdate(3, 2, [9])]
    a.num_tokens = 9
    a.block_table, a.row = [5], 3  # another sequence's, or a restarted one's, in the same row
    assert sent.updates(step(a, new=[True])) == [TableUpdate(3, 0, [5])]


def test_the_block_that_a_step_writes_itself_is_not_sent():
    sent, a = SentBlocks(), running(0)
    a.row, a.block_table, a.num_computed_tokens = 0, [7], 0
    sent.updates(step(a, new=[True]))
    a.block_table = [7, 8]
    assert sent.updates(step(a, new=[False]), np.array([1])) == []
    a.block_table = [7, 8, 9]  # reserved ahead: the step writes entry 1, not this one
    assert sent.updates(step(a, new=[False]), np.array([1])) == [TableUpdate(0, 2, [9])]
