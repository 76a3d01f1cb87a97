"""Case 29 of the list of what broke real engines: a folder that does not fit is refused before anything is read."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine.loader.checkpoint import INDEX_NAME, read_header
from nanoengine.loader.weights import dummy_weights, expected_tensors, read_weights
from nanoengine.model.config import NAMED_CONFIGS, model_type

CONFIG = NAMED_CONFIGS["tiny-llama"]
TIED = NAMED_CONFIGS["tiny-qwen3"]
DOWN = "model.layers.3.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def state():
    return dict(dummy_weights(CONFIG))


def write_shards(folder, state, count=3):
    names = list(state)
    weight_map = {}
    for i in range(count):
        part = names[i::count]
        save_file({name: state[name] for name in part}, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        TIED,
        dataclasses.replace(CONFIG, attention_bias=True),
        dataclasses.replace(CONFIG, mlp_bias=True, tie_word_embeddings=True),
        dataclasses.replace(TIED, attention_bias=True),
        NAMED_CONFIGS["tiny-qwen2"],
        dataclasses.replace(NAMED_CONFIGS["tiny-qwen2"], tie_word_embeddings=False),
    ],
)
def test_names_and_shapes_are_transformers_own(config):
    import transformers

    kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
    kind = kinds[model_type(config)]
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias")  # fmt: skip
    options = {name: getattr(config, name) for name in same}
    options |= {"mlp_bias": config.mlp_bias} if model_type(config) == "llama" else {}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(kind(**options))
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]  # an alias of the embedding there
    assert expected_tensors(config) == shapes


@pytest.mark.parametrize("layout", ["one file", "index", "shards without index"])
def test_what_was_written_is_read(tmp_path, state, layout):
    if layout == "one file":
        save_file(state, tmp_path / "model.safetensors")
        save_file({"other": torch.zeros(1)}, tmp_path / "adapter.safetensors")  # not the model's
    else:
        write_shards(tmp_path, state)
    if layout == "index":
        save_file(state, tmp_path / "consolidated.safetensors")  # not in the index: not read
    elif layout != "one file":
        (tmp_path / INDEX_NAME).unlink()
    back = dict(read_weights(tmp_path, CONFIG))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_tied_head_that_is_stored_all_the_same_is_skipped(tmp_path):
    tied = dict(dummy_weights(TIED))
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}  # old Llama exports have it
    save_file(
        tied | inverse | {"lm_head.weight": tied["model.embed_tokens.weight"].clone()}, tmp_path / "a.safetensors"
    )
    assert {name for name, _ in read_weights(tmp_path, TIED)} == set(tied)


def test_no_safetensors_says_what_is_there(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors.*pytorch_model\.bin.*safe_serialization=True"):
        read_weights(tmp_path, CONFIG)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        read_weights(tmp_path / "nowhere", CONFIG)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1, -4000])
def test_a_truncated_file_is_named(tmp_path, state, kept):
    file = tmp_path / "model.safetensors"
    save_file(state, file)
    file.write_bytes(file.read_bytes()[:kept])
    words = "cut short: tensor model.* ends at byte" if kept < 0 else "cut short or no safetensors file"
    with pytest.raises(ValueError, match=rf"model\.safetensors is {words}"):
        read_weights(tmp_path, CONFIG)


def test_a_damaged_header_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    for text in ('{"a": 1,', '{"a": 1}', '{"a": {"dtype": "F32", "shape": [3]}}', "[]", '"a"'):
        file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(100))
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged: its header"):
            read_header(file)
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=r"tensor a \(3,\) F32 holds 8 bytes"):
        read_header(file)


def test_missing_tensors_are_named(tmp_path, state):
    save_file({k: v for k, v in state.items() if k != DOWN}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing tensor {DOWN}"):
        read_weights(tmp_path, CONFIG)
    save_file({k: v for k, v in state.items() if "layers.2" not in k}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors model\.layers\.2\.input_layernorm\.weight, .* and 5 more"):
        read_weights(tmp_path, CONFIG)


def test_unexpected_tensors_are_named(tmp_path, state):
    save_file(state | {"model.layers.4.mlp.up_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.safetensors: unexpected tensor model\.layers\.4\.mlp\.up_proj\.weight"
    ):
        read_weights(tmp_path, CONFIG)


def test_a_wrong_shape_and_a_wrong_dtype_are_named(tmp_path, state):
    save_file(state | {DOWN: state[DOWN].t().contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {DOWN} has shape \(256, 128\), .* \(128, 256\)"):
        read_weights(tmp_path, CONFIG)
    save_file(state | {DOWN: state[DOWN].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor {DOWN} has dtype F8_E4M3"):
        read_weights(tmp_path, CONFIG)


def test_an_index_that_does_not_fit_is_named(tmp_path, state):
    write_shards(tmp_path, state)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"model-1\.safetensors is missing: model\.safetensors\.index\.json puts"
    ):
        read_weights(tmp_path, CONFIG)
    write_shards(tmp_path, state)
    shard = {k: v for k, v in load_file(tmp_path / "model-0.safetensors").items() if k != "model.embed_tokens.weight"}
    save_file(shard, tmp_path / "model-0.safetensors")
    with pytest.raises(ValueError, match=r"model-0\.safetensors lacks tensor model\.embed_tokens\.weight"):
        read_weights(tmp_path, CONFIG)
    (tmp_path / INDEX_NAME).write_text('{"weight_map": 3}')
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        read_weights(tmp_path, CONFIG)


def test_a_tensor_in_two_files_is_refused(tmp_path, state):
    save_file(state, tmp_path / "a.safetensors")
    save_file({DOWN: state[DOWN]}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=rf"tensor {DOWN} is in both .*a\.safetensors and .*b\.safetensors"):
        read_weights(tmp_path, CONFIG)


def test_dummy_weights_are_the_same_each_time_and_differ_by_seed_and_name(state):
    again = dict(dummy_weights(CONFIG, seed=0))
    other = dict(dummy_weights(CONFIG, seed=1))
    assert {name: tuple(t.shape) for name, t in state.items()} == expected_tensors(CONFIG)
    for name, tensor in state.items():
        assert torch.equal(tensor, again[name])
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            assert not torch.equal(tensor, other[name])
            assert 0.019 < tensor.std() < 0.021
    assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], state["model.layers.1.mlp.up_proj.weight"])


def test_dummy_weights_in_another_dtype_and_with_biases():
    config = dataclasses.replace(CONFIG, attention_bias=True)
    weights = dict(dummy_weights(config, dtype=torch.bfloat16))
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    assert weights["model.layers.0.self_attn.q_proj.bias"].abs().mean() > 0.01, "a bias of 0 would hide one lost"
