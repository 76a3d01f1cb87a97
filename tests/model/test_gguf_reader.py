"""GGUF: split models, types that cannot be read, and keys of a wrong type, each named before anything is converted."""

import gguf
import numpy as np
import pytest
import torch

from nanoengine.loader.gguf_file import convert_gguf
from nanoengine.loader.gguf_reader import split_parts
from nanoengine.loader.resolve import resolve_model
from nanoengine.loader.weights import read_weights
from nanoengine.model.config import load_model_config

from .small_gguf import arrays, gguf_name, hf_model, llama_cpp_order, write_gguf


@pytest.fixture(scope="module")
def llama():
    return arrays(hf_model("llama"))


def refused(path, tmp_path, words, error=ValueError):
    with pytest.raises(error, match=words):
        convert_gguf(path, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists(), "nothing is written before all is known to be readable"


def test_qwen2_comes_back_bit_for_bit(tmp_path):
    from transformers import AutoModelForCausalLM

    rope = {"rope_type": "default", "rope_theta": 5e5}
    model = hf_model("qwen2", rope_parameters=rope, rms_norm_eps=1e-5)
    folder = convert_gguf(
        write_gguf(tmp_path / "small.gguf", "qwen2", arrays(model)),
        tmp_path / "out",
        progress=False,
    )
    config = load_model_config(folder)
    assert (
        config.architecture == "Qwen2ForCausalLM" and config.qkv_bias and not config.attention_bias
    )
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 120)[None]
    with torch.inference_mode():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["blk.1.attn_k.bias", "blk.0.attn_q.bias"])
def test_qwen2_without_a_bias_is_refused(tmp_path, name):
    path = write_gguf(tmp_path / "small.gguf", "qwen2", arrays(hf_model("qwen2")), without=[name])
    refused(path, tmp_path, rf"small\.gguf: missing 1 tensor\(s\): {name}")


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_a_bias_that_the_architecture_does_not_have_is_refused(tmp_path, arch):
    tensors = arrays(hf_model(arch))
    extra = {f"model.layers.{i}.mlp.gate_proj.bias": np.zeros(160, np.float32) for i in range(2)}
    refused(
        write_gguf(tmp_path / "small.gguf", arch, tensors | extra),
        tmp_path,
        "mlp_bias true is not supported",
    )


# Types ---------------------------------------------------------------------------------------------


def with_type(path, tensors, name, dtype=None, number=None):
    """``name`` stored as ``dtype``; or, with ``number``, its type in the file's header replaced by that."""
    tensors = dict(tensors)
    if dtype is not None:
        writer_tensors = {n: a for n, a in tensors.items() if gguf_name(n) != name}
        [(hf, array)] = [(n, a) for n, a in tensors.items() if gguf_name(n) == name]
        original = gguf.GGUFWriter.write_header_to_file

        def add_first(writer, *arguments):
            writer.add_tensor(name, array.astype(dtype))
            return original(writer, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf.GGUFWriter, "write_header_to_file", add_first)
            return write_gguf(path, "llama", writer_tensors)
    write_gguf(path, "llama", tensors)
    reader = gguf.GGUFReader(path, "r+")
    [tensor] = [each for each in reader.tensors if each.name == name]
    tensor.field.parts[4][0] = number
    reader.data.flush()
    return path


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.float64])
def test_a_type_that_cannot_be_read_is_named_with_file_and_tensor(tmp_path, llama, dtype):
    path = with_type(tmp_path / "small.gguf", llama, "blk.1.ffn_down.weight", dtype)
    kind = {"float": "F", "int": "I"}[np.dtype(dtype).name.rstrip("0123456789")] + str(
        8 * np.dtype(dtype).itemsize
    )
    refused(
        path,
        tmp_path,
        rf"small\.gguf: tensor blk\.1\.ffn_down\.weight is of type {kind}, which cannot be read",
    )


@pytest.mark.parametrize("number", [4, 5, 31, 32, 33, 36, 37, 38, 99, 2**31])
def test_a_removed_or_unknown_type_is_named_with_file_and_tensor(tmp_path, llama, number):
    path = with_type(tmp_path / "small.gguf", llama, "blk.1.ffn_down.weight", number=number)
    words = rf"small\.gguf .*tensor blk\.1\.ffn_down\.weight has the unknown or removed type {number}: not supported"
    refused(path, tmp_path, words)


def test_rows_that_are_no_whole_blocks_are_named(tmp_path, llama):
    path = with_type(
        tmp_path / "small.gguf",
        llama,
        "blk.1.attn_norm.weight",
        number=int(gguf.GGMLQuantizationType.Q4_K),
    )
    refused(
        path,
        tmp_path,
        r"small\.gguf .*tensor blk\.1\.attn_norm\.weight has rows of 96 values, Q4_K needs multiples",
    )


# Keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.embedding_length", "96"),
        ("llama.embedding_length", 96.0),
        ("llama.block_count", True),
        ("llama.block_count", [1, 1]),
        ("llama.context_length", 0),
        ("llama.attention.head_count_kv", 0),
        ("llama.attention.head_count_kv", [2, 2]),
        ("llama.attention.key_length", 0),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.attention.layer_norm_rms_epsilon", "1e-5"),
        ("llama.rope.freq_base", float("inf")),
        ("llama.rope.dimension_count", "24"),
        ("llama.expert_count", "8"),
        ("general.architecture", 3),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.token_type", "abc"),
        ("tokenizer.ggml.bos_token_id", "1"),
        ("tokenizer.ggml.eos_token_id", 1.5),
        ("tokenizer.ggml.eos_token_id", True),
        ("tokenizer.ggml.merges", [1]),
        ("tokenizer.ggml.pre", 3),
        ("tokenizer.ggml.model", 3),
        ("tokenizer.ggml.add_bos_token", "true"),
        ("tokenizer.ggml.add_space_prefix", 1),
        ("tokenizer.chat_template", 3),
    ],
)
def test_a_key_of_the_wrong_type_is_named_with_its_file(tmp_path, llama, key, value):
    path = tmp_path / "small.gguf"
    if key == "general.architecture":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                gguf.GGUFWriter, "add_architecture", lambda self: self.add_uint32(key, value)
            )
            write_gguf(path, "llama", llama)
    else:
        write_gguf(path, "llama", llama, **{key.replace(".", "__"): value})
    with pytest.raises(ValueError) as error:
        convert_gguf(path, tmp_path / "out", progress=False)
    name = "architecture" if key == "general.architecture" else key
    assert "small.gguf" in str(error.value) and name in str(error.value), str(error.value)


# Split models ----------------------------------------------------------------------------------------


def write_split(folder, tensors, count=3, counts=None, total=None, first=()):
    """As llama.cpp's splitter does: all metadata in the first file, which may hold no tensor at all."""
    names = list(tensors)
    groups = [list(first), *(names[i :: count - 1] for i in range(count - 1))]
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, (path, group) in enumerate(zip(paths, groups, strict=True)):
        split = {
            "no": i,
            "count": (counts or [count] * count)[i],
            "tensors.count": total or len(names),
        }
        part = {name: tensors[name] for name in group}
        if i == 0:
            keys = {f"split__{key.replace('.', '__')}": value for key, value in split.items()}
            write_gguf(path, "llama", part, **keys)
            continue
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in split.items():
            writer.add_uint32(f"split.{key}", value)
        for name, array in part.items():
            if "q_proj" in name or "k_proj" in name:
                array = llama_cpp_order(array, (4, 2)["k_proj" in name])
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_all_files_of_a_split_model_are_loaded_by_any_of_their_names(tmp_path, llama, asked):
    paths = write_split(tmp_path, llama)
    folder = convert_gguf(paths[asked], tmp_path / "out", progress=False)
    back = dict(read_weights(folder, load_model_config(folder)))
    assert back.keys() == llama.keys()
    assert all(np.array_equal(back[name].numpy(), llama[name]) for name in back)


def test_a_split_model_is_converted_once_by_whatever_name(tmp_path, llama, cache):
    paths = write_split(tmp_path, llama)
    folders = {resolve_model(path, progress=False).folder for path in paths}
    assert len(folders) == 1
    paths[2].touch()
    assert resolve_model(paths[0], progress=False).folder not in folders, (
        "another file under the same name"
    )


@pytest.mark.parametrize("asked", [0, 1])
def test_files_that_are_not_there_are_named(tmp_path, llama, asked):
    paths = write_split(tmp_path, llama)
    paths[2].unlink()
    words = rf"{paths[asked].name} is one of 3 files of a split model; not beside it: m-00003-of-00003\.gguf\. Put all"
    refused(paths[asked], tmp_path, words, FileNotFoundError)
    paths[1 - asked].unlink()
    refused(
        paths[asked],
        tmp_path,
        f"not beside it: {paths[1 - asked].name}, {paths[2].name}",
        FileNotFoundError,
    )


def test_a_split_file_under_another_name_says_how_it_must_be_called(tmp_path, llama):
    [first, *_] = write_split(tmp_path, llama)
    other = first.rename(tmp_path / "model.gguf")
    refused(
        other,
        tmp_path,
        r"model\.gguf is one of 3 files of a split model: they must be named …-00001-of-00003\.gguf",
    )


def test_files_of_different_splits_are_refused(tmp_path, llama):
    paths = write_split(tmp_path, llama)
    paths[2].write_bytes(paths[1].read_bytes())
    refused(
        paths[0], tmp_path, r"m-00003-of-00003\.gguf: split\.no is 1 of 3: the name says otherwise"
    )
    paths = write_split(tmp_path, llama, total=99)
    refused(paths[0], tmp_path, r"split\.tensors\.count is 99, the 3 files hold")
    paths = write_split(tmp_path, llama, first=list(llama)[:1], total=len(llama) + 1)
    refused(paths[0], tmp_path, r"tensor token_embd\.weight is in both .*00001-of.* and .*00002-of")


def test_a_split_file_cut_short_is_named(tmp_path, llama):
    paths = write_split(tmp_path, llama)
    paths[2].write_bytes(paths[2].read_bytes()[:-5000])
    refused(paths[0], tmp_path, r"m-00003-of-00003\.gguf .*cut short: tensor \S+ ends at byte")


def test_one_file_may_be_called_like_a_part(tmp_path, llama):
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", "llama", llama)
    assert len(split_parts(path)) == 3
    assert convert_gguf(path, tmp_path / "out", progress=False)
