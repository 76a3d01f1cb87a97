"""bench host on tiny sizes: that it measures what it says."""

import pytest

from nanoengine.bench import host


def test_every_scenario_decodes_all_its_sequences():
    for scenario in host.features(3):
        scenario.start(20)
        scenario.run_block(20)
        sequences = list(scenario.engine.sequences.values())
        assert len(sequences) == 3, scenario.name  # none has ended
        assert all(len(seq.output_ids) >= 20 for seq in sequences), scenario.name
        assert {token for seq in sequences for token in seq.output_ids} == {host.TOKEN}
        assert len({seq.num_tokens % host.BLOCK_SIZE for seq in sequences}) == 3  # not all need a block at once
        assert scenario.engine.scheduler.num_preemptions == 0
        scenario.engine.block_manager.check_invariants(sequences)


def test_the_dearer_features_are_really_on():
    found = {scenario.name: scenario for scenario in host.features(2)}
    for scenario in found.values():
        scenario.start(8)
        scenario.run_block(8)

    def first(name):
        return next(iter(found[name].engine.sequences.values()))

    assert first("base").detokenizer is None
    assert len(found["observer (Trace)"].engine.observer) == 8 + 3
    assert first("detokeniser").detokenizer.text == "a" * (8 + 3)
    assert first("stop strings").params.stop == ("###", "User:")
    assert all(len(entry) == 5 for entry in first("logprobs=5").logprobs)
    assert len(found["overlap=1"].engine.in_flight) == 1
    assert first("prefix cache off").num_committed_blocks == 0 < first("base").num_committed_blocks
    assert type(found["policy prefill_first"].engine.scheduler.scheduler).__name__ == "PrefillFirstScheduler"


def test_the_parts_are_the_step():
    scenario = host.Scenario("x", 4)
    scenario.start(10)
    scenario.run_block(10)
    for step in scenario.blocks[0]:
        assert all(step[part] > 0 for part in host.PARTS)
        assert sum(step[part] for part in host.PARTS) == pytest.approx(step["step"])


def test_the_report_has_all_rows(monkeypatch):
    monkeypatch.setattr(host, "GROWTH", [(2, 5), (3, 40)])
    result = host.measure(2, steps=2, blocks=2)
    assert result["features"][0]["name"] == "base"
    assert result["features"][0]["over_base"] == 0
    assert [(row["num_seqs"], row["context"]) for row in result["growth"]] == [(2, 5), (3, 40)]
    assert any("sampler" in note for note in result["notes"])
    assert "growth" not in host.measure(2, steps=1, blocks=1, growth=False)


@pytest.mark.parametrize("name", ["num_seqs", "steps", "blocks"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        host.measure(**{name: 0})
