import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from nanoengine.loader import gguf_file
from nanoengine.loader.gguf_file import convert_gguf, unpermute
from nanoengine.loader.gguf_metadata import llama3_divisors
from nanoengine.loader.weights import read_weights
from nanoengine.model.config import load_model_config
from nanoengine.tokenizer.tokenizer import load_tokenizer

from .small_gguf import KINDS, TOKENS, arrays, hf_model, llama_cpp_order, write_gguf

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192


@pytest.fixture(scope="module")
def llama():
    return hf_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def llama_arrays(llama):
    return arrays(llama)


def convert(tmp_path, arch, tensors, **options):
    return convert_gguf(write_gguf(tmp_path / "small.gguf", arch, tensors, **options), tmp_path / "out", progress=False)


def same_logits(model, folder):
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(3, 120).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


# Weights and config ---------------------------------------------------------------------------------


def test_llama_comes_back_bit_for_bit_and_transformers_reads_it(tmp_path, llama, llama_arrays):
    folder = convert(tmp_path, "llama", llama_arrays)
    back = dict(read_weights(folder, load_model_config(folder)))
    assert back.keys() == llama_arrays.keys()
    assert all(np.array_equal(back[name].numpy(), llama_arrays[name]) for name in back)
    same_logits(llama, folder)


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_rows_are_not_permuted(tmp_path, tied):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    model = hf_model("qwen3", rope_parameters=rope, rms_norm_eps=1e-5, tie_word_embeddings=tied)
    folder = convert(tmp_path, "qwen3", arrays(model, tied))
    assert load_model_config(folder).tie_word_embeddings is tied
    same_logits(model, folder)


def test_biases_are_permuted_too(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    model = hf_model("llama", rope_parameters=rope, rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True)
    folder = convert(tmp_path, "llama", arrays(model))
    config = load_model_config(folder)
    assert config.attention_bias and config.mlp_bias
    same_logits(model, folder)


def test_llama3_rope_scaling_is_found_in_the_tensor_of_divisors(tmp_path):
    model = hf_model("llama", rope_parameters={**LLAMA3, "rope_theta": 5e5}, rms_norm_eps=1e-5)
    plain = 1.0 / 5e5 ** (torch.arange(0, 24, 2).float() / 24)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()  # as llama.cpp writes them
    assert 1 < divisors[-1] and divisors[0] == 1
    np.testing.assert_allclose(llama3_divisors(LLAMA3, 5e5, 24), divisors, rtol=1e-5)
    folder = convert(tmp_path, "llama", arrays(model) | {"rope_freqs.weight": divisors})
    assert load_model_config(folder).rope_scaling == LLAMA3
    same_logits(model, folder)
    with pytest.raises(ValueError, match="rope_freqs.weight"):
        convert(tmp_path, "llama", arrays(model) | {"rope_freqs.weight": divisors[::-1].copy()})


def test_linear_rope_scaling(tmp_path, llama_arrays):
    keys = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    folder = convert(tmp_path, "llama", llama_arrays, **keys)
    assert load_model_config(folder).rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_metadata_becomes_config(tmp_path, llama_arrays):
    raw = json.loads((convert(tmp_path, "llama", llama_arrays) / "config.json").read_text())
    assert raw["rms_norm_eps"] == 1e-5 and raw["rope_theta"] == 5e5 and raw["head_dim"] == 24
    assert (raw["vocab_size"], raw["num_key_value_heads"], raw["dtype"]) == (len(TOKENS), 2, "float32")
    assert raw["eos_token_id"] == [2, 0], "eos first, then ChatML's other end token"


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_stored_bits_are_kept(tmp_path, llama_arrays, quant):
    tensors = {name: a[..., :96] if "down" in name else a for name, a in llama_arrays.items()}  # blocks of 32
    tensors = {name: a[:96] if "gate" in name or "up_" in name else a for name, a in tensors.items()}
    folder = convert(tmp_path, "llama", tensors, quant=quant, llama__feed_forward_length=96)
    kept = {"F16": torch.float16, "BF16": torch.bfloat16}.get(quant, torch.float32)
    config = load_model_config(folder)
    assert config.dtype == str(kept).removeprefix("torch.")
    for name, tensor in read_weights(folder, config):
        kind = gguf.GGMLQuantizationType[quant if tensor.dim() > 1 else "F32"]
        expected = gguf.dequantize(gguf.quantize(np.ascontiguousarray(tensors[name]), kind), kind)
        assert tensor.dtype == (kept if tensor.dim() > 1 else torch.float32)
        assert np.array_equal(tensor.float().numpy(), expected), name


def test_large_files_are_written_in_shards_with_an_index(tmp_path, llama_arrays, monkeypatch):
    monkeypatch.setattr(gguf_file, "SHARD_BYTES", 100_000)
    folder = convert(tmp_path, "llama", llama_arrays)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3 and all(len(load_file(shard)) for shard in shards)
    back = dict(read_weights(folder, load_model_config(folder)))
    assert all(np.array_equal(back[name].numpy(), llama_arrays[name]) for name in llama_arrays)


@pytest.mark.parametrize(("heads", "dim", "tail"), [(1, 2, ()), (3, 8, (5,)), (9, 64, (2,))])
def test_unpermute_undoes_llama_cpps_order(heads, dim, tail):
    rows = np.random.default_rng(0).random((heads * dim, *tail))
    assert np.array_equal(unpermute(llama_cpp_order(rows, heads), heads), rows)
    assert dim == 2 or not np.array_equal(llama_cpp_order(rows, heads), rows)


# Errors name file and tensor ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"without": ["blk.1.attn_k.weight"]}, ["blk.1.attn_k.weight", "missing"]),
        ({"without": ["token_embd.weight"]}, ["token_embd.weight", "missing"]),
        ({"llama__feed_forward_length": 128}, ["blk.0.ffn_gate.weight", "(160, 96)", "(128, 96)"]),
        ({"llama__block_count": 1}, ["blk.1.attn_k.weight", "unexpected"]),
        ({"llama__attention__head_count": None}, ["llama.attention.head_count", "missing"]),
        ({"llama__expert_count": 8}, ["llama.expert_count", "not supported"]),
        ({"llama__rope__dimension_count": 12}, ["llama.rope.dimension_count", "not supported"]),
        ({"llama__rope__scaling__type": "yarn"}, ["yarn", "not supported"]),
        ({"tokenizer__ggml__pre": "deepseek-llm"}, ["tokenizer.ggml.pre", "deepseek-llm", "smollm"]),
        ({"tokenizer__ggml__model": "bert"}, ["tokenizer.ggml.model", "bert"]),
        ({"tokenizer__ggml__tokens": None}, ["tokenizer.ggml.tokens", "missing"]),
        ({"tokenizer__ggml__merges": None}, ["tokenizer.ggml.merges", "missing"]),
        ({"tokenizer__ggml__merges": ["h zz"]}, ["tokenizer.ggml.merges", "zz"]),
        ({"tokenizer__ggml__eos_token_id": 9999}, ["tokenizer.ggml.eos_token_id is 9999"]),
        ({"llama__attention__head_count": [4, 4]}, ["llama.attention.head_count", "[4, 4]"]),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path, llama_arrays, options, words):
    with pytest.raises(ValueError) as error:
        convert(tmp_path, "llama", llama_arrays, **options)
    assert all(word in str(error.value) for word in ["small.gguf", *words]), str(error.value)


def test_another_architecture_is_refused(tmp_path, llama_arrays):
    with pytest.raises(ValueError, match=r"small\.gguf: architecture 'gemma' is not supported.*llama, qwen2, qwen3"):
        convert(tmp_path, "gemma", llama_arrays)


def test_a_file_cut_short_names_the_tensor(tmp_path, llama_arrays):
    path = write_gguf(tmp_path / "small.gguf", "llama", llama_arrays)
    data = path.read_bytes()
    path.write_bytes(data[:-5000])
    with pytest.raises(ValueError, match=r"small\.gguf .*cut short: tensor \S+\.weight ends at byte"):
        convert_gguf(path, tmp_path / "out", progress=False)
    for length in (5, 30, 2000):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"small\.gguf"):
            convert_gguf(path, tmp_path / "out", progress=False)


def test_a_damaged_text_is_an_error_with_the_files_name(tmp_path, llama_arrays):
    path = write_gguf(tmp_path / "small.gguf", "llama", llama_arrays)
    path.write_bytes(path.read_bytes().replace(b"<|im_start|>", b"<|im_st\xff\xff\xff|>"))
    with pytest.raises(ValueError, match=r"small\.gguf is damaged: a text in its metadata is not UTF-8"):
        convert_gguf(path, tmp_path / "out", progress=False)


def test_no_gguf_file(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 a zip")
    with pytest.raises(ValueError, match="x.gguf is not a GGUF file"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="y.gguf"):
        convert_gguf(tmp_path / "y.gguf", tmp_path / "out")


# Tokenizer --------------------------------------------------------------------------------------------


def words(tokenizer, text):
    """How the text is cut into words, as the byte alphabet writes them."""
    return [word for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "numbers", "contraction"),
    [
        ("smollm", ["a", "Ġ", "1", "2", "3", "4"], ["It", "'s"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4"], ["It", "'s"]),
        ("llama-bpe", ["a", "Ġ", "123", "4"], ["It", "'s"]),
        ("gpt-2", ["a", "Ġ1234"], ["It", "'s"]),
        ("default", ["a", "Ġ1234"], ["It", "'s"]),
    ],
)
def test_digits_rule(tmp_path, llama_arrays, pre, numbers, contraction):
    tokenizer = load_tokenizer(convert(tmp_path, "llama", llama_arrays, tokenizer__ggml__pre=pre))
    assert words(tokenizer, "a 1234") == numbers
    assert words(tokenizer, "It's") == contraction
    upper = words(tokenizer, "IT'S")
    assert upper == (["IT", "'S"] if pre in ("qwen2", "llama-bpe") else ["IT", "'", "S"])


def test_special_and_user_defined_tokens(tmp_path, llama_arrays):
    tokenizer = load_tokenizer(convert(tmp_path, "llama", llama_arrays))
    assert tokenizer.special_ids == {0, 1, 2}
    think = TOKENS.index("<think>")
    assert tokenizer.encode("<|im_start|><think>") == [1, think]
    assert tokenizer.decode([1, think]) == "<think>", "a user-defined token is text"
    assert tokenizer.decode([KINDS.index(5)]) == "", "an unused id is no token"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n"


def test_bos_is_added_where_the_file_or_llama_3_says_so(tmp_path, llama_arrays):
    for options, first in [({}, None), ({"tokenizer__ggml__add_bos_token": True}, 1),
                           ({"tokenizer__ggml__pre": "llama-bpe"}, 1)]:  # fmt: skip
        tokenizer = load_tokenizer(convert(tmp_path, "llama", llama_arrays, **options))
        ids = tokenizer.encode("he", add_special_tokens=False)
        assert tokenizer.encode("he") == ([first] if first else []) + ids


def test_all_end_tokens_are_found(tmp_path, llama_arrays):
    tokens, kinds = list(TOKENS), list(KINDS)
    tokens[-1], kinds[-1] = "<|eot_id|>", 3
    keys = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": kinds, "tokenizer__ggml__eot_token_id": 7}
    config = load_model_config(convert(tmp_path, "llama", llama_arrays, **keys))
    assert config.eos_token_ids == (2, 7, 0, len(tokens) - 1)


def test_sentencepiece_merges_by_score(tmp_path, llama_arrays):
    pieces = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -9.0, "bc": -5.0, "abc": -20.0, "▁a": -7.0, "▁ab": -6.0}
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    tensors = {n: np.resize(a, (len(tokens), 96)) if len(a) == len(TOKENS) else a for n, a in llama_arrays.items()}
    keys = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": tokens,
        "token_type": kinds,
        "unknown_token_id": 0,
        "scores": [0.0] * 259 + list(pieces.values()),
    }
    keys = {f"tokenizer__ggml__{key}": value for key, value in keys.items()}
    tokenizer = load_tokenizer(convert(tmp_path, "llama", tensors, **keys))
    rng = np.random.default_rng(0)
    for text in ["a", "abc", "é", *("".join(rng.choice(list("abc "), 12)) for _ in range(50))]:
        expected = [1, *(i for piece in greedy("▁" + text.replace(" ", "▁"), pieces) for i in ids_of(piece, tokens))]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == text


def greedy(text, scores):
    """SentencePiece's own rule, spelt out: merge the neighbours whose union scores best, leftmost first."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in scores]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def ids_of(piece, tokens):
    return [tokens.index(piece)] if piece in tokens else [tokens.index(f"<0x{b:02X}>") for b in piece.encode()]


def test_the_byte_alphabet_is_the_librarys():
    assert set(TOKENS[3:259]) == set(pre_tokenizers.ByteLevel.alphabet())
