"""Every field that is read is checked for type, range and being finite, and the error names file and field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoengine.model.config import ModelConfig, config_from_dict, load_model_config
from nanoengine.tokenizer.tokenizer import byte_tokenizer, load_tokenizer

RAW = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
}
NAN, INF = float("nan"), float("inf")
NO_SIZE = ["64", 64.0, True, 0, -1, NAN, [64], {}]
NO_NUMBER = ["1e-5", "abc", True, -1, NAN, INF, -INF, [1], {}, 10**400]
NO_FLAG = ["false", "true", 0, 1, 1.0, [], {}, None]
WRONG = {
    **dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ),
        [*NO_SIZE, None],
    ),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), NO_SIZE),
    "rms_norm_eps": [*NO_NUMBER, None],
    "rope_theta": [*NO_NUMBER, None, 0],
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), NO_FLAG
    ),
    "hidden_act": [None, 3, "gelu", ["silu"]],
    "layer_types": [
        "full_attention",
        [3],
        ["full_attention"],
        ["full_attention", "sliding_attention"],
        {},
    ],
    "dtype": [16, "float8_e4m3fn", "fp16", ["float16"]],
    "torch_dtype": [16, "torch.int8"],
    "rope_scaling": ["linear", [1], 3],
    "bos_token_id": ["1", 1.0, True, ["1"]],
    "eos_token_id": ["2", [2, "3"], 2.0, True, [True], {}],
    "model_type": [None, 3, ["llama"], "gpt2"],
    "_name_or_path": [3],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_an_error_that_names_file_and_field(tmp_path, name, value):
    (tmp_path / "config.json").write_text(json.dumps({**RAW, name: value}))
    with pytest.raises(ValueError) as error:
        load_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value) and name in str(error.value), str(
        error.value
    )
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_what_a_kind_of_model_does_not_have_is_refused(model_type):
    with pytest.raises(
        ValueError, match=f"mlp_bias true is not supported for model_type '{model_type}'"
    ):
        config_from_dict({**RAW, "model_type": model_type, "mlp_bias": True})
    with pytest.raises(
        ValueError, match=r"use_sliding_window true \(sliding-window attention\) is not supported"
    ):
        config_from_dict({**RAW, "model_type": model_type, "use_sliding_window": True})
    window = {
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 1,
        "layer_types": None,
    }
    config_from_dict({**RAW, "model_type": model_type, **window})


def test_null_is_absent_where_absent_is_a_value():
    nothing = dict.fromkeys(
        (
            "num_key_value_heads",
            "head_dim",
            "rope_scaling",
            "rope_parameters",
            "bos_token_id",
            "eos_token_id",
            "dtype",
            "torch_dtype",
            "layer_types",
            "quantization_config",
        )
    )
    config = config_from_dict({**RAW, **nothing})
    assert (config.num_key_value_heads, config.head_dim, config.dtype) == (4, 16, "bfloat16")
    assert config.rope_scaling is None and config.eos_token_ids == ()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = st.sampled_from([*WRONG, "rope_parameters", "quantization_config", "partial_rotary_factor"])


@given(
    st.dictionaries(KEYS, VALUES, max_size=3),
    st.none() | st.dictionaries(st.just("eos_token_id"), VALUES),
)
def test_any_values_at_all_are_a_config_or_a_value_error(changes, generation):
    try:
        assert isinstance(config_from_dict({**RAW, **changes}, generation=generation), ModelConfig)
    except ValueError as error:
        assert "config.json" in str(error)


@pytest.mark.parametrize("value", ["2", [2, None], {"a": 1}, True])
def test_generation_config_is_named_where_it_is_wrong(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match=r"/generation_config\.json: eos_token_id"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe{", b'{"a":' * 20000, b'{"a": 1}}']
)
def test_a_damaged_file_is_named(tmp_path, name, data):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"/{name} (is not valid JSON|must hold a JSON object)"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer.json", b"[1]"),
        ("tokenizer_config.json", b""),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b'"x"'),
        ("chat_template.jinja", b"{{ \xff }}"),
    ],
)
def test_a_damaged_tokenizer_file_is_named(tmp_path, name, data):
    byte_tokenizer(300).backend.save(str(tmp_path / "tokenizer.json"))
    load_tokenizer(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_bytes()
    for damage in [data] + ([whole[:-100]] if name == "tokenizer.json" else []):
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(ValueError, match=rf"/{name} "):
            load_tokenizer(tmp_path)


def test_a_vocabulary_without_tokenizer_json_says_what_is_there(tmp_path):
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").touch()
    with pytest.raises(
        FileNotFoundError,
        match=r"tokenizer\.json does not exist; the folder holds merges\.txt, vocab\.json",
    ):
        load_tokenizer(tmp_path)
