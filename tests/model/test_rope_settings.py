"""Every way to write down a rotary embedding against transformers (or llama.cpp's loader): equal logits, or refused."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from nanoengine.config import EngineConfig
from nanoengine.loader.gguf_file import convert_gguf
from nanoengine.loader.weights import expected_tensors
from nanoengine.model.config import config_from_dict
from nanoengine.model.decoder import full_forward
from nanoengine.worker.model_runner import load_decoder

from .small_gguf import TOKENS, arrays, hf_model, write_gguf

SIZES = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
READ = {
    "theta at the top": {"rope_theta": 7e4},
    "theta inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "inside beats the top": {
        "rope_theta": 7e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "inside beats the top's null": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "the top fills in": {"rope_theta": 7e4, "rope_parameters": {"rope_type": "default"}},
    "the older name, and type": {
        "rope_theta": 7e4,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "the older name beats the newer": {
        "rope_scaling": {"rope_type": "linear", "factor": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "rope_type beats type": {
        "rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 3.0}
    },
    "an empty older name": {
        "rope_scaling": {},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    },
    "nothing": {},
    "llama3": {"rope_parameters": {**LLAMA3, ORIGINAL: 64, "rope_theta": 1e4}},
    "llama3's own length": {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
    "llama3's length at the top": {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}, ORIGINAL: 16},
    "llama3's length twice": {
        "rope_parameters": {**LLAMA3, "rope_theta": 1e4, ORIGINAL: 32},
        ORIGINAL: 16,
    },
    "numbers that default does not read": {
        "rope_parameters": {"rope_type": "default", "factor": 3.0}
    },
}


def write(folder, kind, changes):
    raw = {"model_type": kind, **SIZES, **changes}
    (folder / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    shapes = expected_tensors(config_from_dict({"model_type": kind, **SIZES}))
    save_file(
        {n: torch.randn(s, generator=generator) * 0.3 for n, s in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


def logits(model, ids):
    config = EngineConfig(
        max_model_len=128, vocab_size=ids.max().item() + 1, device="cpu", dtype="float32"
    )
    decoder = load_decoder(model, "auto", config, torch.device("cpu"))
    with torch.inference_mode():
        return full_forward(decoder, ids.tolist())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", READ)
def test_config_json_is_read_as_transformers_reads_it(tmp_path, name, kind):
    from transformers import AutoModelForCausalLM

    folder = write(tmp_path, kind, READ[name])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(60).repeat(2)[:100]
    with torch.inference_mode():
        wanted = model(ids[None]).logits[0]
    torch.testing.assert_close(logits(folder, ids), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_parameters_for_each_type_of_layer(tmp_path, kind):
    """transformers' own Qwen models cannot run them: the one type that there is must be as if it stood alone."""
    inner = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    ids = torch.arange(60)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    nested = write(
        tmp_path / "a",
        kind,
        {"rope_parameters": {"full_attention": inner, "sliding_attention": sliding}},
    )
    flat = write(tmp_path / "b", kind, {"rope_parameters": inner})
    assert torch.equal(logits(nested, ids), logits(flat, ids))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope type 'yarn' is not supported",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_parameters": {"rope_type": None}}, "rope type None"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, r"rope type \['linear'\]"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"'rope_parameters\.factor' is missing"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
            r"rope_parameters\.factor .*got '2'",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}},
            r"rope_parameters\.factor .*got nan",
        ),
        ({"rope_parameters": {"rope_theta": -1}}, r"rope_parameters\.rope_theta .*got -1"),
        ({"rope_parameters": {"rope_theta": None}}, r"rope_parameters\.rope_theta .*got None"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object"),
        ({"rope_theta": "abc"}, "rope_theta must be a positive finite number, got 'abc'"),
        ({"rope_theta": None}, "rope_theta .*got None"),
        ({"rope_theta": 0}, "rope_theta .*got 0"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "factor": 2,
                    "partial_rotary_factor": 0.25,
                }
            },
            r"rope_parameters\.partial_rotary_factor 0\.25",
        ),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
            r"high_freq_factor must be more than low_freq_factor",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            r"rope_parameters\.full_attention is not supported",
        ),
        (
            {"model_type": "qwen3", "rope_parameters": {"sliding_attention": {"rope_theta": 5e5}}},
            r"rope_parameters\.sliding_attention is not supported",
        ),
        (
            {
                "model_type": "qwen3",
                "rope_parameters": {"full_attention": {"rope_theta": 5e5}, "rope_theta": 1e4},
            },
            r"rope_parameters\.full_attention is not supported",
        ),
        ({"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=f"my.json: .*{words}"):
        config_from_dict({"model_type": "llama", **SIZES, **changes}, source="my.json")


def test_what_changes_nothing_is_named_in_a_warning():
    raw = {
        "model_type": "llama",
        **SIZES,
        "rope_theta": 7e4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e5,
            "mscale": 2.0,
            "factor": None,
        },
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert config_from_dict(raw, source="my.json").rope_theta == 5e5
        config_from_dict({"model_type": "llama", **SIZES, "rope_theta": 7e4}, source="other.json")
    assert [str(warning.message) for warning in caught] == [
        "my.json: rope_parameters.rope_theta=500000 is used, not the rope_theta=70000.0 of the top level",
        "my.json: rope type 'default' does not read rope_parameters.mscale",
    ]


# GGUF: llama.cpp's loader is the rule -------------------------------------------------------------------

LINEAR = {
    "the old key alone": {"rope__scale_linear": 2.0},
    "a factor without a type": {"rope__scaling__factor": 2.0},
    "a factor with its type": {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
    "the newer key counts": {"rope__scaling__factor": 2.0, "rope__scale_linear": 3.0},
    "type and old key": {"rope__scaling__type": "linear", "rope__scale_linear": 2.0},
    "what YaRN alone reads": {
        "rope__scaling__factor": 2.0,
        "rope__scaling__yarn_ext_factor": 0.5,
        "rope__scaling__finetuned": True,
        "rope__scaling__original_context_length": 64,
    },
}
NONE = {
    "none switches a factor off": {"rope__scaling__type": "none", "rope__scaling__factor": 2.0},
    "a factor of 0": {"rope__scaling__factor": 0.0},
    "0 beats the old key": {"rope__scaling__factor": 0.0, "rope__scale_linear": 3.0},
    "an attention factor of 1": {"rope__scaling__attn_factor": 1.0},
}


@pytest.fixture(scope="module")
def models():
    """{factor of linear scaling: model of transformers}"""
    rope = {
        1.0: {"rope_type": "default", "rope_theta": 5e5},
        2.0: {"rope_type": "linear", "factor": 2.0},
    }
    return {
        f: hf_model("llama", rope_parameters=r | {"rope_theta": 5e5}, rms_norm_eps=1e-5)
        for f, r in rope.items()
    }


def write_small(tmp_path, model, **keys):
    keys = {f"llama__{key}": value for key, value in keys.items()}
    return write_gguf(tmp_path / "small.gguf", "llama", arrays(model), **keys)


@pytest.mark.parametrize("name", [*LINEAR, *NONE])
def test_gguf_keys_are_read_as_llama_cpp_reads_them(tmp_path, models, name):
    keys, factor = (LINEAR[name], 2.0) if name in LINEAR else (NONE[name], 1.0)
    path = write_small(tmp_path, models[1.0], **keys)
    folder = convert_gguf(path, tmp_path / "out", progress=False)
    ids = torch.arange(len(TOKENS))[:100]
    with torch.inference_mode():
        wanted = models[factor](ids[None]).logits[0]
    torch.testing.assert_close(logits(folder, ids), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope__scaling__type": "yarn"}, r"llama\.rope\.scaling\.type 'yarn' is not supported"),
        ({"rope__scaling__type": "longrope"}, r"llama\.rope\.scaling\.type 'longrope'"),
        ({"rope__scaling__type": 3}, r"llama\.rope\.scaling\.type must be a text, got 3"),
        ({"rope__scaling__factor": -2.0}, r"llama\.rope\.scaling\.factor must be .*got -2"),
        (
            {"rope__scaling__factor": float("nan")},
            r"llama\.rope\.scaling\.factor must be .*got nan",
        ),
        ({"rope__scale_linear": "2"}, r"llama\.rope\.scale_linear must be .*got '2'"),
        (
            {"rope__scaling__attn_factor": 1.5},
            r"llama\.rope\.scaling\.attn_factor 1\.5 is not supported",
        ),
        ({"rope__dimension_sections": [1, 2]}, r"llama\.rope\.dimension_sections is not supported"),
        ({"rope__freq_base": 0.0}, r"llama\.rope\.freq_base must be a positive finite number"),
    ],
)
def test_gguf_keys_that_are_not_read_are_refused_by_name(tmp_path, models, keys, words):
    path = write_small(tmp_path, models[1.0], **keys)
    with pytest.raises(ValueError, match=rf"small\.gguf: {words}"):
        convert_gguf(path, tmp_path / "out", progress=False)
