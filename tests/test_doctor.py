"""nanoengine doctor: a line for everything, also where things are missing, broken or slow."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from nanoengine import doctor
from nanoengine.doctor import course, machine
from nanoengine.doctor.check import Check, is_older, pip_install, required, version_of
from nanoengine.loader import embedded

# sitecustomize of a Python in which some packages cannot be found
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def _doctor(tmp_path, blocked, **env):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(blocked=set(blocked)))
    return subprocess.run(
        [sys.executable, "-m", "nanoengine", "doctor", "--json"], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def _examined(name):
    return next(doctor.examine([entry for entry in doctor.CHECKS if entry[0] == name]))


def test_here_the_course_can_run(tmp_path):
    began = time.monotonic()
    found = _doctor(tmp_path, [])
    taken = time.monotonic() - began
    report = json.loads(found.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert found.returncode == 0, [c for c in report["checks"] if c["needed"] and c["status"] != "ok"]
    assert report["can_run_cpu_course"] is True
    assert list(checks) == [name for name, *_ in doctor.CHECKS]
    assert "The capital of France is' Paris" in checks["generation"]["detail"]
    assert sum(check["seconds"] for check in checks.values()) <= taken
    for check in checks.values():
        assert check["status"] in doctor.SYMBOLS
        assert check["detail"]
        assert check["fix"] or check["status"] == "ok", f"nothing to type for {check['name']}"


def test_without_torch_jupyter_and_gguf_each_line_says_what_to_type(tmp_path):
    blocked = ["torch", "jupyterlab", "ipywidgets", "triton", "transformers", "psutil", "gguf", "tokenizers"]
    found = _doctor(tmp_path, blocked)
    assert found.returncode == 1
    assert found.stderr == ""
    report = json.loads(found.stdout)
    assert report["can_run_cpu_course"] is False
    checks = {check["name"]: check for check in report["checks"]}
    assert list(checks) == [name for name, *_ in doctor.CHECKS]
    for name in ("torch", "jupyterlab", "ipywidgets", "transformers", "tokenizer"):
        assert checks[name]["status"] == "missing"
        assert "-m pip install" in checks[name]["fix"]
    assert "torch>=" in checks["torch"]["fix"]
    assert checks["python"]["status"] == checks["nbval"]["status"] == "ok"
    assert all(check["fix"] for check in checks.values() if check["status"] != "ok")


@pytest.mark.parametrize(
    ("error", "status", "detail", "fix"),
    [
        (OSError("libtorch.so: not found\nsecond"), "problem", "OSError: libtorch.so: not found", "make setup"),
        (RuntimeError(), "problem", "RuntimeError: no message", "make setup"),
        (SystemExit(3), "problem", "SystemExit: 3", "make setup"),
        (ModuleNotFoundError("x", name="yaml.parser"), "missing", "the package yaml is not installed", "PyYAML>="),
    ],
)
def test_a_check_that_raises_is_a_line(error, status, detail, fix, capsys):
    def broken():
        raise error

    fine = ("fine", True, lambda: Check("ok", "good"))
    first, second = doctor.examine([("broken", True, broken), fine])
    assert (first.status, first.detail, first.name, first.needed) == (status, detail, "broken", True)
    assert fix in first.fix
    assert (second.status, second.name) == ("ok", "fine")  # the others are still tried
    assert not doctor.can_run_course([first, second])
    assert capsys.readouterr().err == ""


def test_what_is_printed(capsys):
    checks = [Check("ok", "good", name="one", needed=True), Check("missing", "absent", "do this", name="two")]
    assert doctor.show(iter(checks)) == checks
    out = capsys.readouterr().out
    assert out.startswith("ok       one          good\nmissing  two          absent\n")
    assert "-> do this\n" in out
    assert "The CPU course can run. (0 s)" in out
    doctor.show([Check("problem", "bad", "do that", name="three", needed=True)])
    assert "cannot run yet: see three." in capsys.readouterr().out


def test_only_what_is_needed_counts():
    wrong = Check("problem", "x", "y", needed=False)
    assert doctor.can_run_course([wrong, Check("ok", "x", needed=True)])
    assert not doctor.can_run_course([wrong, Check("missing", "x", "y", needed=True)])


@pytest.mark.parametrize(
    ("version", "floor", "older"),
    [("2.9", "2.11", True), ("2.11.0+cpu", "2.11", False), ("2.13.0+cpu", "2.11", False), ("1.99.9", "2", True)],
)
def test_versions_are_compared_as_numbers(version, floor, older):
    assert is_older(version, floor) is older


def test_floors_come_from_the_package():
    assert required()["torch"] == "2.11"
    assert "pytest" not in required()  # an extra
    assert pip_install("torch", "nowhere").endswith("-m pip install 'torch>=2.11' nowhere")


def test_a_package_that_cannot_be_imported_counts_as_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "nbval", None)
    with pytest.raises(ModuleNotFoundError, match="nbval"):
        version_of("nbval")
    assert _examined("nbval").status == "missing"


def test_an_old_package_is_a_problem(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.1")
    check = _examined("ipywidgets")
    assert (check.status, check.detail.split(":")[0]) == ("problem", "0.0.1")
    assert "--upgrade" in check.fix
    assert "torch (0.0.1, needed 2.11)" in _examined("packages").detail


def test_a_model_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOENGINE_CACHE", str(tmp_path))
    assert "converted at first use" in _examined("model").detail
    monkeypatch.setattr(embedded, "find_installed", lambda: None)
    for name in ("model", "generation", "tokenizer"):
        check = _examined(name)
        assert check.status == "missing"
        assert check.fix == embedded.INSTALL_COMMAND
    assert list(tmp_path.iterdir()) == []  # looking changes nothing


def test_the_converted_folder_is_the_one_that_is_used():
    assert course.converted_folder() == embedded.embedded_model_folder(progress=False)


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("import sys; sys.exit('out of luck')", "out of luck"),
        ("import os; os.abort()", "the process ended with -6"),
        ("import time; time.sleep(60)", "no answer in 1 s"),
    ],
)
def test_a_model_that_fails_kills_or_hangs_is_a_line(monkeypatch, code, detail):
    monkeypatch.setattr(course, "GENERATE", code)
    monkeypatch.setattr(course, "GENERATE_SECONDS", 1 if "sleep" in code else 60)
    monkeypatch.setattr(course, "model", lambda: Check("ok", "there"))
    check = _examined("generation")
    assert (check.status, check.detail) == ("problem", detail)
    assert "nanoengine generate" in check.fix


def test_a_cache_that_cannot_be_written_or_is_full(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOENGINE_CACHE", str(tmp_path / "new" / "folder"))
    assert _examined("cache").status == "ok"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written" in _examined("cache").detail
    monkeypatch.setattr("os.access", lambda path, mode: True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**29))
    check = _examined("cache")
    assert (check.status, check.fix.split("=")[0]) == ("problem", "export NANOENGINE_CACHE")


def test_passwords_of_an_index_are_not_shown(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:secret@mirror.example/simple")
    monkeypatch.setenv("HF_ENDPOINT", "https://token@hub.example")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    detail = _examined("index").detail
    assert "pip: https://mirror.example/simple; hub: https://hub.example, HF_HUB_OFFLINE is set" in detail
    assert "secret" not in detail and "token" not in detail


def _torch(cuda, available):
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: available, device_count=lambda: 1, get_device_name=lambda i: "Some GPU",
            get_device_capability=lambda i: (9, 0),
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "cuda", "available", "status", "piece"),
    [
        ("", None, False, "missing", "no NVIDIA GPU"),
        ("H200, 570, 141 GB", None, False, "problem", "this torch cannot use it"),
        ("H200, 570, 141 GB", "13.0", False, "problem", "the driver is too old for CUDA 13.0"),
        ("H200, 570, 141 GB", "13.0", True, "ok", "H200, 570"),
        ("", "13.0", True, "ok", "Some GPU"),
    ],
)
def test_what_is_said_of_a_gpu(monkeypatch, seen, cuda, available, status, piece):
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: seen)
    monkeypatch.setitem(sys.modules, "torch", _torch(cuda, available))
    check = _examined("gpu")
    assert (check.status, piece in check.detail) == (status, True)
    assert bool(check.fix) == (status != "ok")
