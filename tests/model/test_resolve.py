"""What a user may call a model. The hub is a small server on this machine, or a cache folder laid out by hand."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from safetensors.torch import save_file

from nanoengine.loader.resolve import resolve_model
from nanoengine.loader.weights import dummy_weights, read_weights
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.tokenizer.tokenizer import byte_tokenizer

from .small_gguf import arrays, hf_model, write_gguf

CONFIG = NAMED_CONFIGS["tiny-llama"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_model(folder, weights=True):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta")  # fmt: skip
    raw = {"model_type": "llama", **{name: getattr(CONFIG, name) for name in names}}
    (folder / "config.json").write_text(json.dumps(raw))
    byte_tokenizer(1024).backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    if weights:
        save_file(dict(dummy_weights(CONFIG)), folder / "model.safetensors")
    return folder


def can_be_loaded(files):
    assert files.load_format == "safetensors"
    assert len(dict(read_weights(files.folder, files.config))) == len(dict(dummy_weights(CONFIG)))


# On this machine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "smollm2", "SmolLM2-135M-Instruct"])
def test_embedded(embedded_folder, name):
    files = resolve_model(name)
    assert files.folder == embedded_folder and files.config.hidden_size == 576


def test_a_folder(tmp_path):
    folder = write_model(tmp_path / "my model")
    for model in (folder, str(folder)):
        files = resolve_model(model)
        assert files.folder == folder and files.config.name == "my model"
        can_be_loaded(files)


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        resolve_model(tmp_path)


def test_a_gguf_file_is_converted_once(tmp_path, cache):
    path = write_gguf(tmp_path / "tiny.gguf", "llama", arrays(hf_model("llama")))
    files = resolve_model(path, progress=False)
    assert files.folder.parent == cache and files.config.hidden_size == 96
    made = (files.folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(path), progress=False).folder == files.folder
    assert (files.folder / "model.safetensors").stat().st_mtime_ns == made
    os.utime(path, ns=(1, 1))  # another file under the same name
    assert resolve_model(path, progress=False).folder != files.folder


def test_another_kind_of_file(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"model\.bin is a file; nanoengine reads \.gguf files"):
        resolve_model(tmp_path / "model.bin")


@pytest.mark.parametrize("name", NAMED_CONFIGS)
def test_dummy_by_name(name):
    files = resolve_model(name, load_format="dummy")
    assert (files.folder, files.config, files.load_format) == (None, NAMED_CONFIGS[name], "dummy")


def test_dummy_by_folder_needs_no_weights(tmp_path):
    folder = write_model(tmp_path / "shape", weights=False)
    files = resolve_model(folder, load_format="dummy")
    assert files.folder == folder and files.load_format == "dummy" and files.config.hidden_size == 128
    assert resolve_model(load_format="dummy").config == NAMED_CONFIGS["smollm2-135m"]


@pytest.mark.parametrize("model", ["nonsense", "/no/such/folder", "./here/not", "a/b/c", "x.gguf", "org/model.gguf"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_what_is_unknown_lists_what_is_possible(model, load_format):
    with pytest.raises(ValueError, match=r"no model .*'smollm2'.*\.gguf.*Qwen/Qwen3-0\.6B.*tiny-llama"):
        resolve_model(model, load_format=load_format)


def test_a_shape_without_weights_says_dummy():
    with pytest.raises(ValueError, match=r"'qwen3-0\.6b' is a shape without weights: use load_format='dummy'"):
        resolve_model("qwen3-0.6b")


@pytest.mark.parametrize("model", ["", 3, ["a"]])
def test_a_model_must_be_a_name_or_a_path(model):
    with pytest.raises(ValueError, match="model must be None, a name or a path"):
        resolve_model(model)


def test_an_unknown_load_format():
    with pytest.raises(ValueError, match="load_format must be one of auto, dummy, got 'fast'"):
        resolve_model(load_format="fast")


def test_neither_torch_nor_transformers_is_imported(tmp_path):
    write_model(tmp_path)
    code = (
        f"import sys; from nanoengine.loader.resolve import resolve_model; resolve_model({str(tmp_path)!r}); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The hub. Its addresses are read from the environment when huggingface_hub is imported: a process of its own.


def resolve_elsewhere(model, environment, load_format="auto"):
    code = (
        "import sys; from nanoengine.loader.resolve import resolve_model\n"
        f"files = resolve_model({model!r}, load_format={load_format!r}, progress=False)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "print(files.folder, files.config.hidden_size, files.config.name, files.load_format)"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**kept, **environment}, timeout=120
    )


def test_a_repo_id_from_the_local_cache(tmp_path):
    repo = tmp_path / "hub" / "models--org--tiny"
    write_model(repo / "snapshots" / COMMIT)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    result = resolve_elsewhere("org/tiny", {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    assert result.stdout.split() == [str(repo / "snapshots" / COMMIT), "128", "org/tiny", "safetensors"], result.stderr


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_that_cannot_be_reached_says_the_three_ways_out(tmp_path, environment):
    result = resolve_elsewhere("org/tiny", {"HF_HOME": str(tmp_path), **environment})
    assert result.returncode == 1
    last = result.stderr[result.stderr.rindex("OSError: 'org/tiny'") :]
    for words in ("HF_ENDPOINT=https://", "a local folder", "'smollm2'"):
        assert words in last
    assert (environment.get("HF_ENDPOINT") or "HF_HUB_OFFLINE is set") in last


class Hub(BaseHTTPRequestHandler):
    """The three requests that a snapshot needs: the commit, the list of files, a file."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        files = {file.relative_to(self.server.folder).as_posix(): file for file in self.server.folder.rglob("*.*")}
        if path.startswith("/api/models/org/tiny/tree/"):
            listed = [{"type": "file", "path": n, "size": f.stat().st_size, "oid": "0" * 40} for n, f in files.items()]
            return self.answer(200, json.dumps(listed).encode())
        if path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in files]
            about = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "private": False, "siblings": siblings}
            return self.answer(200, json.dumps({**about, "tags": [], "downloads": 0}).encode())
        prefix = f"/org/tiny/resolve/{COMMIT}/"
        if path.startswith(prefix) and path.removeprefix(prefix) in files:
            return self.answer(200, files[path.removeprefix(prefix)].read_bytes())
        self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def answer(self, status, body, headers=None):
        etag = hashlib.sha1(body).hexdigest()
        self.send_response(status)
        for key, value in {
            "Content-Length": len(body),
            "ETag": f'"{etag}"',
            "X-Repo-Commit": COMMIT,
            **(headers or {}),
        }.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.asked = write_model(tmp_path / "remote"), []
    (server.folder / "original").mkdir()
    for unwanted in ("pytorch_model.bin", "README.md", "consolidated.safetensors", "original/params.json"):
        (server.folder / unwanted).write_text("not wanted")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_repo_id_from_a_mirror_and_then_offline(tmp_path, hub):
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    result = resolve_elsewhere("org/tiny", environment, load_format="dummy")
    assert result.returncode == 0, result.stderr
    assert not any(path.endswith(".safetensors") for path in hub.asked), "random weights need no download"
    result = resolve_elsewhere("org/tiny", environment)
    assert result.returncode == 0, result.stderr
    folder, hidden, name, load_format = result.stdout.split()
    assert (hidden, name, load_format) == ("128", "org/tiny", "safetensors")
    can_be_loaded(resolve_model(folder))
    assert not any(
        word in path for path in hub.asked for word in ("pytorch_model", "README", "consolidated", "original/")
    )
    again = resolve_elsewhere("org/tiny", {**environment, "HF_HUB_OFFLINE": "1"})
    assert again.stdout == result.stdout


def test_a_repo_that_does_not_exist(tmp_path, hub):
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    result = resolve_elsewhere("org/other", environment)
    assert result.returncode == 1 and "OSError: 'org/other' is no folder here" in result.stderr
    assert "404" in result.stderr[result.stderr.rindex("OSError") :]
