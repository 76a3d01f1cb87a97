"""transformers beside our engine: the same shape, the same work, and only what was asked for counts."""

import json

import pytest
import torch

from nanoengine.bench import commands
from nanoengine.bench.gpu import show
from nanoengine.bench.peers import generate_statically, huggingface_model, static_batches, transformers_beside
from nanoengine.bench.workload import Workload
from nanoengine.loader.weights import dummy_weights
from nanoengine.model.config import NAMED_CONFIGS

WORK = Workload("w", [[1, 2, 3], [4], [5, 6]], [4, 2, 3])


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_the_peer_has_our_shape(name):
    config = NAMED_CONFIGS[name]
    model = huggingface_model(config, "cpu", torch.float32)
    ours = dict(dummy_weights(config, dtype=torch.float32, device="cpu"))
    theirs = model.state_dict()
    assert ours.keys() <= theirs.keys() and theirs.keys() - ours.keys() <= {"lm_head.weight"}
    assert all(theirs[key].shape == weight.shape for key, weight in ours.items())
    assert not model.training and next(model.parameters()).dtype == torch.float32


def test_a_batch_runs_until_its_longest_answer_is_done():
    assert static_batches(WORK, 2) == [([[1, 2, 3], [4]], 4, [4, 2]), ([[5, 6]], 3, [3])]


def test_only_tokens_that_were_asked_for_count():
    model = huggingface_model(NAMED_CONFIGS["tiny-llama"], "cpu", torch.float32)
    found = generate_statically(model, WORK, 2)
    assert found["tokens_in_vain"] == 2 and found["batch_size"] == 2  # row 2 of the first batch: 4 instead of 2
    assert found["output_tok_s"] * found["seconds"] == pytest.approx(9, rel=0.5)


def test_it_stands_beside_our_figure():
    beside = transformers_beside(NAMED_CONFIGS["tiny-qwen3"], WORK, 4, device="cpu")
    text = show({"machine": "m", "date": "d", "model": "m", "workload": "w", "output_tok_s": 2 * beside["output_tok_s"],
                 "runs_tok_s": [1.0], "first_token_s": 1, "beside": beside})  # fmt: skip
    assert "transformers 5" in text and "static batches of 4" in text and "2.0 times as fast" in text


def test_our_figure_is_kept_before_transformers_begins(monkeypatch, tmp_path, capsys):
    """It takes minutes more, and whoever gives up on it has measured ours nevertheless."""
    from nanoengine.bench import gpu, gpu_commands, peers
    from nanoengine.cli import main

    ours = {"machine": "m", "date": "d", "model": "m", "workload": "w", "output_tok_s": 10.0, "runs_tok_s": [10.0],
            "first_token_s": 1}  # fmt: skip
    theirs = {"transformers": "5", "seconds": 2, "output_tok_s": 5.0, "batch_size": 256, "tokens_in_vain": 1}
    file = tmp_path / "result.json"
    found = []

    def beside(config, workload, batch):
        found.append((json.loads(file.read_text()), config.hidden_size, batch))
        return theirs

    monkeypatch.setattr(gpu, "throughput", lambda model, runs: dict(ours))
    monkeypatch.setattr(peers, "transformers_beside", beside)
    for module in (gpu_commands, commands):
        monkeypatch.setattr(module, "has_gpu", lambda: True)
    assert main(["bench", "offline", "--json", str(file), "--hf-batch", "256"]) == 0
    assert found == [(ours, 1024, 256)]
    assert json.loads(file.read_text()) == ours | {"beside": theirs}
    assert "2.0 times as fast" in capsys.readouterr().out
    assert main(["bench", "offline", "--json", str(file), "--no-hf"]) == 0 and len(found) == 1
    assert json.loads(file.read_text()) == ours
