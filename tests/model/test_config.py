import json

import pytest

from nanoengine.loader.weights import expected_tensors
from nanoengine.model.config import NAMED_CONFIGS, config_from_dict, load_model_config

LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def read(**changes):
    return config_from_dict({**LLAMA, **changes})


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_what_transformers_saves_is_read(tmp_path, arch):
    import transformers

    kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
    kind = kinds[arch]
    sizes = {k: v for k, v in LLAMA.items() if k != "model_type"}
    rope = {**LLAMA3_ROPE, "rope_theta": 5e5}
    saved = kind(**sizes, head_dim=24, rope_parameters=rope, eos_token_id=[5, 6], rms_norm_eps=1e-4, dtype="float16")
    saved.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads, config.rope_theta) == (64, 24, 2, 5e5)
    assert LLAMA3_ROPE.items() <= config.rope_scaling.items()
    assert (config.eos_token_ids, config.rms_norm_eps, config.dtype) == ((5, 6), 1e-4, "float16")
    assert (config.qk_norm, config.qkv_bias) == (arch == "qwen3", arch == "qwen2")
    assert config.attention_bias is False and config.tie_word_embeddings is False


def test_the_older_spelling_of_rope_is_read():
    config = read(rope_theta=7e4, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.rope_theta == 7e4 and config.rope_scaling["rope_type"] == "linear"
    assert read(rope_theta=7e4).rope_scaling is None


def test_end_tokens_are_a_list_and_generation_config_comes_first(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 7}))
    assert load_model_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [45, 43]}))
    assert load_model_config(tmp_path).eos_token_ids == (45, 43)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_model_config(tmp_path).eos_token_ids == (7,)
    assert read().eos_token_ids == () and read(eos_token_id=0).eos_token_ids == (0,)


def test_ids_that_the_vocabulary_does_not_have_are_left_out_with_a_warning(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": [7, 100], "bos_token_id": 999}))
    with pytest.warns(UserWarning) as seen:
        config = load_model_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((7,), None)
    texts = [str(warning.message) for warning in seen]
    assert len(texts) == 2 and all(str(tmp_path / "config.json") in text for text in texts)
    assert "eos_token_id 100 is outside the vocabulary [0, 100)" in texts[0] and "bos_token_id 999" in texts[1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 2**40]}))
    with pytest.warns(UserWarning, match="generation_config.json: eos_token_id -1, 1099511627776 is outside"):
        assert load_model_config(tmp_path).eos_token_ids == (7,), "the other file's are left"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 99}))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model_config(tmp_path).eos_token_ids == (99,)


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, None], [[2]], {"id": 2}])
@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id"])
def test_what_is_no_token_id_is_refused_with_file_and_field(name, value):
    with pytest.raises(ValueError, match=f"config.json: {name} must be a token id"):
        read(**{name: value})


def test_head_dim_where_it_is_not_said():
    assert read().head_dim == 16
    assert read(model_type="qwen3").head_dim == 128
    assert read(num_key_value_heads=None).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma' is not supported.*llama, qwen2 and qwen3"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {**LLAMA3_ROPE, "factor": None}}, "rope_scaling.factor must be a positive finite"),
        ({"rope_scaling": {"rope_type": "linear"}}, "the field 'rope_scaling.factor' is missing"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    ],
)
def test_what_is_not_served_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        read(**changes)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="the field 'intermediate_size' is missing"):
        config_from_dict({k: v for k, v in LLAMA.items() if k != "intermediate_size"})


def test_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        load_model_config(tmp_path)
    for text, words in [("{", "is not valid JSON"), ("[]", "must hold a JSON object"), ("\xff", "is not valid JSON")]:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=rf"config\.json {words}"):
            load_model_config(tmp_path)


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_number_of_parameters_is_the_sum_over_the_tensors(name):
    config = NAMED_CONFIGS[name]
    total = 0
    for shape in expected_tensors(config).values():
        total += shape[0] * (shape[1] if len(shape) > 1 else 1)
    assert config.num_parameters() == total


def test_known_sizes():
    assert NAMED_CONFIGS["smollm2-135m"].num_parameters() == 134_515_008  # the model card says 135M
    assert NAMED_CONFIGS["qwen3-0.6b"].num_parameters() == 596_049_920  # 0.6B, of which 0.44B no embedding
    assert NAMED_CONFIGS["qwen2.5-0.5b"].num_parameters() == 494_032_768  # the model card says 0.49B
    assert NAMED_CONFIGS["qwen3-0.6b"].kv_bytes_per_token(2) == 114_688
