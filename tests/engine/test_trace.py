"""The trace: schema, files, and a complete story of every request."""

from __future__ import annotations

import json

import pytest

from nanoengine.sampling_params import SamplingParams
from nanoengine.trace import FIELDS, SCHEMA, Trace, record, why

from .fuzz import MoodyRunner, Scenario
from .helpers import engine, finish


def traced(overlap=0, policy="token_budget", **kwargs):
    eng = engine(6, 4, overlap=overlap, policy=policy, max_num_seqs=3, observer=Trace(), **kwargs)
    seqs = [eng.add_request(p, SamplingParams(max_tokens=9)) for p in ([1] * 9, [1] * 9, [2], [1] * 9, [3, 4])]
    finish(eng)
    return eng, eng.observer, seqs


@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_each_record_has_all_fields_and_adds_up(policy, overlap):
    eng, trace, _ = traced(overlap, policy)
    assert [step["step"] for step in trace] == list(range(len(trace)))
    for step in trace:
        assert tuple(sorted(step)) == tuple(sorted(FIELDS)) and step["schema"] == SCHEMA
        assert json.loads(json.dumps(step))
        assert (step["policy"], step["num_blocks"], step["block_size"]) == (policy, 6, 4)
        assert len(step["slot_mapping"]) == sum(row["tokens"] for row in step["rows"])
        held = [block for table in step["block_tables"].values() for block in table]
        for block, count in enumerate(step["ref_counts"]):
            if not overlap:  # an ended sequence holds its blocks until its step in flight lands
                assert count == held.count(block)
            assert (count == 0) == (block in step["free"])
        assert set(step["cached_free"]) <= set(step["free"])
        assert set(step["waiting"]) | set(step["running"]) == set(step["sequences"])
        slots = iter(step["slot_mapping"])
        for row in step["rows"]:
            assert row["context"] == row["start"] + row["tokens"]
            assert row["kind"] in ("prefill", "decode")
            for p in range(row["start"], row["context"]):
                assert next(slots) == step["block_tables"][row["seq"]][p // 4] * 4 + p % 4
        assert step["seconds"]["total"] >= 0 and step["seconds"]["at"] >= 0


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_new_tokens_of_all_steps_are_the_outputs(overlap):
    _, trace, seqs = traced(overlap)
    for seq in seqs:
        new = [token for step in trace for row in step["rows"] if row["seq"] == seq.seq_id for token in row["new"]]
        assert new == seq.output_ids


def story(trace, seq_id):
    return [event["kind"] for step in trace for event in step["events"] if event["seq"] == seq_id]


def assert_complete(trace, seqs):
    for seq in seqs:
        kinds = story(trace, seq.seq_id)
        assert kinds.count("arrive") == 1 and kinds[0] == "arrive", (seq, kinds)
        assert kinds.count("preempt") == seq.num_preemptions
        assert kinds.count("admit") == 1 + seq.num_preemptions
        assert kinds.count("finish") == 1 and kinds[-1] == "finish"
    for step in trace:
        assert all(event["why"] for event in step["events"])


@pytest.mark.parametrize("policy", ["token_budget", "prefill_first"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_each_request_arrives_is_admitted_and_finishes(policy, overlap):
    eng, trace, seqs = traced(overlap, policy)
    assert eng.scheduler.num_preemptions > 0
    assert_complete(trace, seqs)


def test_random_lives_tell_complete_stories():
    checked = 0
    for seed in range(60):
        scenario = Scenario(seed)
        if isinstance(scenario.engine.observer, Trace):
            scenario.run()
            assert_complete(scenario.engine.observer,
                            [seq for seq, _ in scenario.requests if seq.finish_reason != "abort"])  # fmt: skip
            checked += len(scenario.requests)
    assert checked > 100


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("hold_back", [False, True])
def test_a_failed_step_loses_no_arrival_and_no_end(overlap, hold_back):
    class FailsOnce(MoodyRunner):
        calls = 0

        def _maybe_fail(self, where):
            self.calls += 1
            if self.calls in (1, 6, 7):
                raise OSError(where)

    eng = engine(runner=FailsOnce(None, 0, 12, 4, 50, hold_back=hold_back), overlap=overlap, observer=Trace())
    seqs = [eng.add_request([k] * 3, SamplingParams(max_tokens=k)) for k in (1, 2, 9)]
    failures = 0
    while eng.has_unfinished():
        try:
            eng.step()
        except OSError:
            failures += 1
    assert failures == 3
    for seq in seqs:
        kinds = story(eng.observer, seq.seq_id)
        assert kinds.count("arrive") == kinds.count("finish") == 1
    assert [step["step"] for step in eng.observer] == list(range(len(eng.observer)))


def test_aborts_are_events():
    eng = engine(observer=Trace())
    seqs = [eng.add_request([k]) for k in range(3)]
    eng.step()
    eng.abort(seqs[1])
    finish(eng)
    assert story(eng.observer, 1) == ["arrive", "admit", "abort"]


@pytest.mark.parametrize("overlap", [0, 1])
def test_attached_and_detached_in_mid_run(overlap):
    eng = engine(overlap=overlap)
    seqs = [eng.add_request([k], SamplingParams(max_tokens=6 + 3 * k)) for k in range(3)]
    for _ in range(3):
        eng.step()
    with record(eng) as trace:
        for _ in range(6):
            eng.step()
    assert eng.observer is None
    assert len(trace) == 6 - overlap, "a step launched before is not in it"
    assert story(trace, 0) == ["arrive", "finish"]
    before = len(trace)
    with record(eng) as second:
        finish(eng)
    assert len(trace) == before and len(second) > 0
    assert story(second, 2) == ["arrive", "finish"]
    assert [step["step"] for step in second] == list(range(len(second)))
    assert all(seq.is_finished for seq in seqs)


def test_a_sequence_that_ends_in_a_step_launched_before_the_trace_still_ends_in_it():
    eng = engine(overlap=1)
    short = eng.add_request([1], SamplingParams(max_tokens=2))
    eng.add_request([2], SamplingParams(max_tokens=9))
    eng.step()
    eng.step()  # lands the first step; the second, with the last token of ``short``, is in flight
    with record(eng) as trace:
        finish(eng)
    assert short.is_finished and story(trace, short.seq_id) == ["arrive", "finish"]


def test_record_restores_the_observer_when_the_block_raises():
    eng = engine(observer=(mine := Trace()))
    with pytest.raises(KeyError), record(eng):
        raise KeyError
    assert eng.observer is mine


def test_no_observer_builds_no_record(monkeypatch):
    eng = engine(overlap=1)
    monkeypatch.setattr(Trace, "before", None)
    monkeypatch.setattr("nanoengine.trace._row", None)
    eng.add_request([1, 2])
    eng.step()
    assert eng.in_flight[0].record is None
    finish(eng)


def test_tracing_changes_no_output():
    outputs = []
    for observer in (None, Trace()):
        eng = engine(6, 4, observer=observer, max_num_seqs=3)
        seqs = [eng.add_request([k] * 7, SamplingParams(max_tokens=12)) for k in range(5)]
        finish(eng)
        outputs.append([seq.token_ids for seq in seqs])
    assert outputs[0] == outputs[1]


# files


def test_save_and_load_give_the_same_records(tmp_path):
    _, trace, _ = traced()
    path = trace.save(tmp_path / "run.jsonl")
    again = Trace.load(path)
    assert again.steps == trace.steps
    assert again[0] == trace[0] and len(list(again)) == len(trace)


def test_an_empty_trace_is_a_trace(tmp_path):
    assert len(Trace.load(Trace().save(tmp_path / "empty.jsonl"))) == 0


DAMAGE = [
    (lambda lines: [lines[0], lines[1][:50]], "line 2 is not JSON"),
    (lambda lines: [lines[0], "[]"], f"line 2 is no trace record of schema {SCHEMA}"),
    (lambda lines: [lines[0].replace('"schema": 1', '"schema": 99')], f"line 1 is no trace record of schema {SCHEMA}"),
    (lambda lines: ['{"schema": 1}'], "line 1 is damaged: it lacks step, policy"),
    (lambda lines: [lines[0].replace('"rows"', '"roes"')], "line 1 is damaged: it lacks rows"),
    (lambda lines: [lines[0].replace('"sequences": {"0"', '"sequences": {"zero"')], "line 1 is damaged: "),
    (lambda lines: [lines[0], "\x00\x01"], "line 2 is not JSON"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[m for _, m in DAMAGE])
def test_a_damaged_file_is_named_with_its_line(tmp_path, damage, message):
    _, trace, _ = traced()
    path = trace.save(tmp_path / "run.jsonl")
    path.write_text("\n".join(damage(path.read_text(encoding="utf-8").splitlines())), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        Trace.load(path)
    assert str(path) in str(error.value) and message in str(error.value)


def test_a_binary_file_is_a_clear_error(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        Trace.load(path)


def test_an_unknown_event_kind_is_an_error():
    with pytest.raises(ValueError, match="unknown event kind 'dance'"):
        why({"kind": "dance", "seq": 1})
