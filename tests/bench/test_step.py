"""bench step measures decode steps of the rows and contexts that it names."""

import pytest

from nanoengine import LLM
from nanoengine.bench import step
from nanoengine.cli import main
from nanoengine.trace import record

TINY = dict(device="cpu", max_model_len=256, num_blocks=200)


def test_steps_are_decode_steps_of_all_rows():
    lens = step.contexts_of(5, 40)
    assert min(lens) >= 20 and max(lens) <= 60 and lens == step.contexts_of(5, 40) and len(set(lens)) > 1
    with LLM("tiny-qwen3", load_format="dummy", max_num_batched_tokens=32, **TINY) as llm:
        with record(llm) as trace:
            assert step.seconds_of_steps(llm, lens, 7) > 0
        assert not llm.engine.sequences
        assert [len(one["slot_mapping"]) for one in list(trace)[-9:]] == [5] * 9  # two steps more than are timed


def test_figures_of_each_scene(monkeypatch):
    monkeypatch.setattr(step, "machine", lambda: {"machine": "one NVIDIA H200", "date": "d"})
    monkeypatch.setattr(step, "seconds_of_steps", lambda llm, lens, steps: 0.002 * len(lens))
    result = step.measure("tiny-qwen3", [(3, 40), (1, 20)], 6, lambda text: None, **TINY)
    first, second = result["rows"]
    assert (first["rows"], first["context"], first["step_ms"]) == (3, 40, 6.0)
    assert 0 < second["least_ms"] <= first["least_ms"] < 6 and first["percent"] < 1
    text = step.show(result)
    assert "   3       40     6.000" in text and text.count("\n") == 3


def test_a_real_measurement_without_a_card_that_is_known(monkeypatch):
    monkeypatch.setattr(step, "machine", lambda: {"machine": "one toaster", "date": "d"})
    result = step.measure("tiny-qwen3", [(2, 20)], 4, lambda text: None, **TINY)
    assert result["rows"][0]["step_ms"] > 0 and "least_ms" not in result["rows"][0]
    assert "toaster" in step.show(result)


@pytest.mark.parametrize(("scene", "message"), [((300, 4), "max_num_seqs"), ((4, 300), "max_model_len"),
                                                ((60, 100), "KV blocks")])  # fmt: skip
def test_a_scene_that_does_not_fit_is_refused(scene, message, monkeypatch):
    monkeypatch.setattr(step, "machine", lambda: {"machine": "m", "date": "d"})
    with pytest.raises(ValueError, match=message):
        step.measure("tiny-qwen3", [scene], 6, **TINY)


@pytest.mark.parametrize("text", ["16", "x", "0x5", "3x1", "2x-4", "axb"])
def test_the_form_of_a_scene(text):
    with pytest.raises(ValueError, match="ROWSxCONTEXT"):
        step.parse_scene(text)
    assert step.parse_scene("16x1500") == (16, 1500)


@pytest.mark.parametrize("command", [["step", "--scene", "3x20"], ["products", "--rows", "4"]])
def test_they_say_that_a_gpu_is_missing(command, capsys):
    import torch

    if not torch.cuda.is_available():
        assert main(["bench", *command]) == 2
        assert "needs a CUDA GPU" in capsys.readouterr().err
