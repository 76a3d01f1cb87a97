"""bench offline on a tiny model with random weights, through both engines."""

import json

import pytest
import torch
from safetensors.torch import save_file

from nanoengine.bench import offline
from nanoengine.bench.worker import peak_mib
from nanoengine.cli import main
from nanoengine.loader.weights import dummy_weights
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.tokenizer.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """tiny-llama as a folder that transformers reads as well."""
    folder, c = tmp_path_factory.mktemp("tiny-llama"), NAMED_CONFIGS["tiny-llama"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers, "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim, "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta, "max_position_embeddings": c.max_position_embeddings,
        "eos_token_id": list(range(c.vocab_size)),  # whatever comes is an end token, and must not end a run
        "tie_word_embeddings": c.tie_word_embeddings, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    # ten times the usual spread: logits far apart, so that rounding does not choose the token
    weights = {k: (v.float() * (1 if v.dim() == 1 else 10)).contiguous() for k, v in dummy_weights(c)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer(c.vocab_size).backend.save(str(folder / "tokenizer.json"))
    return folder


def test_both_engines_run_and_agree(tiny_folder, tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["--model", str(tiny_folder), "--batch-sizes", "1", "3", "--new-tokens", "6", "--runs", "1"]
    assert main(["bench", "offline", *arguments, "--threads", "1", "--no-first-token", "--json", str(file)]) == 0
    result, table = json.loads(file.read_text()), capsys.readouterr().out
    rows = {(row["engine"], row["batch_size"]): row for row in result["results"]}
    assert set(rows) == {("ours", 1), ("hf", 1), ("ours", 3), ("hf", 3)}
    for (_, size), row in rows.items():
        assert row["generated_tokens"] == 6 * size
        assert row["tokens_per_s"] == pytest.approx(6 * size / row["seconds"][0])
    for size in (1, 3):  # unequal lengths: Hugging Face's batch is padded
        assert rows["hf", size]["agreement"] == {"requests": size, "equal": size, "differ": []}
        assert f"{size} of {size} requests got" in table
    assert len(set(result["workload"]["input_lens"])) == 3
    assert set(result["ratios"]) == {"batch 1 / hf batch 1", "batch 3 / hf batch 3", "batch 3 / hf batch 1"}
    assert all(100 < mib < 10_000 for mib in result["peak_mib"].values())


def test_our_engine_alone_in_a_fresh_process(tiny_folder):
    taken = offline.time_to_token(offline.FIRST_TOKEN["ours"].format(model=str(tiny_folder), prompt="a", threads=1), 1)
    assert taken > 0.1  # Python alone takes a part of that


def test_both_fresh_processes_take_turns_and_the_first_turn_only_warms(monkeypatch):
    seconds, asked = iter(range(1, 7)), []
    monkeypatch.setattr(offline, "time_to_token", lambda code, threads: asked.append(code) or next(seconds))
    found = offline._first_tokens(["ours", "hf"], "some/folder", offline.Settings(runs=2))
    assert found == {"ours": [3, 5], "hf": [4, 6]}
    for code in asked[:2]:
        compile(code, "first_token", "exec")
        assert "'some/folder'" in code


def test_an_engine_that_fails_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="nanoengine: .*" + tmp_path.name):
        offline.Worker("ours", str(tmp_path), 1)


def test_a_fresh_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="ValueError: no luck"):
        offline.time_to_token("raise ValueError('no luck')", 1)


def test_peak_memory_never_falls():
    before = peak_mib()
    block = torch.ones(50 * 2**18)  # 50 MiB
    assert before <= peak_mib()
    assert block.sum() == 50 * 2**18
    assert peak_mib() >= 50
