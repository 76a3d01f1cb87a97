"""What a trace is read into."""

import copy

import pytest

from nanoengine.viz.state import History, letter

from .conftest import EVENTFUL, run


def test_letters_are_those_of_a_spreadsheet():
    assert [letter(i) for i in (0, 1, 25, 26, 27, 51, 52, 701, 702)] == "A B Z AA AB AZ BA ZZ AAA".split()


def test_letters_follow_the_order_of_arrival(eventful):
    assert list(History(eventful).letters.values()) == list("ABCDE")


def test_the_run_used_here_has_everything(eventful):
    kinds = {event["kind"] for step in eventful for event in step["events"]}
    assert kinds >= {"arrive", "admit", "hit", "preempt", "finish"}
    assert any(count > 1 for step in eventful for count in step["ref_counts"])
    assert any(step["cached_free"] for step in eventful)


def test_runs_cover_each_request_from_arrival_to_end_without_gap_or_overlap(eventful):
    history = History(eventful)
    for seq, runs in history.runs.items():
        steps = [i for run in runs for i in range(run.first, run.last + 1)]
        alive = [i for i, step in enumerate(eventful) if seq in step["sequences"]]
        assert steps == alive


def test_phases_are_what_the_rows_say(prefill_first):
    history = History(prefill_first)
    phases = {(seq, i): run.phase for seq, runs in history.runs.items() for run in runs
              for i in range(run.first, run.last + 1)}  # fmt: skip
    for i, step in enumerate(prefill_first):
        rows = {row["seq"]: row["kind"] for row in step["rows"]}
        for seq in step["running"]:
            assert phases[seq, i] == rows.get(seq, "idle")
        for seq in step["waiting"]:
            assert phases[seq, i] in ("waiting", "preempted")
    assert "idle" in phases.values(), "under prefill_first, decodes pause while prompts are computed"


def test_a_state_knows_nothing_of_later_steps(eventful):
    whole, cut = History(eventful), History(eventful[:9])
    for i in range(9):
        full, short = whole.at(i), cut.at(i)
        assert full.marks == {**dict.fromkeys(full.marks, []), **short.marks}
        assert {seq: runs for seq, runs in full.runs.items() if runs} == {s: r for s, r in short.runs.items() if r}
        assert full.ended == short.ended


def test_before_a_step_the_pool_is_what_the_scheduler_had(eventful, prefill_first):
    for trace in (eventful, prefill_first):
        history = History(trace)
        for i in range(1, len(trace)):
            seen, planned = history.before(i).record, trace[i]
            admitted = {event["seq"] for event in planned["events"] if event["kind"] == "admit"}
            preempted = {event["seq"] for event in planned["events"] if event["kind"] == "preempt"}
            assert set(seen["running"]) - preempted == set(planned["running"]) - admitted
            assert set(seen["waiting"]) == set(planned["waiting"]) - preempted | admitted - preempted
            assert not set(seen["free"]) & {block for table in seen["block_tables"].values() for block in table}
            assert set(seen["cached_free"]) <= set(seen["free"])
            assert set(planned["cached_free"]) & set(seen["free"]) <= set(seen["cached_free"])
            for seq, table in seen["block_tables"].items():
                if seq not in preempted:
                    assert planned["block_tables"][seq][: len(table)] == table


def test_a_cached_free_block_says_who_computed_it(eventful, prefill_first, long_run):
    """The oracle follows the block tables: a block belongs to whom it was given to, but a hit leaves it as it was."""
    for trace in (eventful, prefill_first, long_run):
        history, given, before = History(trace), {}, {}
        for i, step in enumerate(trace):
            found = {event["seq"]: event["tokens"] // step["block_size"] for event in step["events"]
                     if event["kind"] == "hit"}  # fmt: skip
            if i:
                seen = history.before(i)
                assert {block: seen.wrote[block] for block in seen.record["cached_free"]} == {
                    block: given[block] for block in seen.record["cached_free"]
                }
            for seq, table in step["block_tables"].items():
                new = table if seq not in before else table[len(before[seq]) :]
                given.update((block, seq) for block in new[found.get(seq, 0) :])
            before, state = step["block_tables"], history.at(i)
            assert {block: state.wrote[block] for block in step["cached_free"]} == {
                block: given[block] for block in step["cached_free"]
            }
        assert any(step["cached_free"] for step in trace)
    # A trace that begins later does not guess.
    late = next(i for i, step in enumerate(eventful) if step["cached_free"])
    assert History(eventful[late : late + 1]).at(0).wrote == {}


def test_before_a_step_nobody_is_chosen_and_newcomers_wait(eventful):
    history = History(eventful)
    first = history.before(0)
    assert first.asking and first.record["rows"] == [] and first.record["events"] == []
    assert first.record["running"] == [] and len(first.record["waiting"]) == 2
    assert len(first.record["free"]) == 12
    assert all(progress["computed"] == 0 for progress in first.record["sequences"].values())
    assert all(run.last < 8 for runs in history.before(8).runs.values() for run in runs)


def test_jumps_find_every_event(eventful):
    history = History(eventful)
    for kind in ("admit", "hit", "preempt", "finish"):
        assert history.jumps(kind) == [
            i for i, step in enumerate(eventful) if kind in {event["kind"] for event in step["events"]}
        ]
    assert set(history.jumps("any")) == {i for k in ("admit", "hit", "preempt", "finish") for i in history.jumps(k)}


def test_who_ends_with_a_step_has_ended_only_after_it(eventful):
    history = History(eventful)
    for i in range(len(history)):
        ends = [(event["seq"], event["reason"]) for step in eventful[:i] for event in step["events"]
                if event["kind"] == "finish"]  # fmt: skip
        assert history.at(i).ended == ends
    assert len(history.at(-1).ended) == 4, "the last one ends with the last step"


def test_an_aborted_request_has_ended():
    trace = run(EVENTFUL, num_blocks=12, block_size=4, max_num_batched_tokens=12, abort_at=6)
    assert (4, "abort") in History(trace).at(-1).ended


def test_nothing_is_written_into_the_trace(eventful):
    before = copy.deepcopy(eventful.steps)
    history = History(eventful)
    for i in range(len(history)):
        history.at(i)
        history.before(i)
    assert eventful.steps == before


def test_errors_say_what_to_do(eventful):
    with pytest.raises(ValueError, match="with record"):
        History([])
    with pytest.raises(IndexError, match="step 99 is not in this trace of 21 steps"):
        History(eventful).at(99)
