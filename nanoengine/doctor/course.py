"""Checks of what the course needs: packages, the model, its cache, where things would come from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from nanoengine.doctor.check import DISTRIBUTIONS, PYTHON, Check, is_older, pip_install, required, version_of
from nanoengine.shown import quoted

GENERATE_SECONDS = 45  # a first conversion takes ten; doctor as a whole stays under 60
GENERATE = """
import json, time
began = time.monotonic()
from nanoengine import LLM, SamplingParams
with LLM(max_model_len=64, max_num_seqs=1) as llm:
    out = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
print(json.dumps({"text": out.text, "tokens": len(out.token_ids), "seconds": time.monotonic() - began}))
"""


def packages() -> Check:
    floors, wrong = required(), []
    for name, floor in floors.items():
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            have = None
        if have is None or is_older(have, floor):
            wrong.append(f"{name} ({have or 'not installed'}, needed {floor})")
    if wrong:
        return Check("missing", ", ".join(wrong), "make setup")
    if not floors:
        return Check("missing", "nanoengine itself is not installed, only found here", "make setup")
    return Check("ok", f"all {len(floors)} that nanoengine requires, at their floors or newer")


def package(name: str) -> Callable[[], Check]:
    """A check that ``name`` can be found and is new enough."""

    def check() -> Check:
        version, floor = version_of(name), required().get(DISTRIBUTIONS.get(name, name), "0")
        if is_older(version, floor):
            return Check("problem", f"{version}: {floor} or newer is needed", pip_install(name, options="--upgrade"))
        return Check("ok", version)

    return check


def converted_folder() -> Path:
    """Where the embedded model lies once it was converted."""
    from nanoengine.loader import embedded
    from nanoengine.loader.cache import cache_root
    from nanoengine.loader.gguf_file import CONVERTER_VERSION

    return cache_root() / f"smollm2-135m-instruct-{embedded.GGUF_SHA256[:12]}-v{CONVERTER_VERSION}"


def model() -> Check:
    from nanoengine.loader import embedded
    from nanoengine.loader.checkpoint import is_complete

    folder, installed = converted_folder(), embedded.find_installed()
    if is_complete(folder):
        return Check("ok", f"SmolLM2-135M-Instruct, converted, in {folder}")
    if installed is None:
        return Check("missing", f"{embedded.PACKAGE} {embedded.VERSION} (93 MB)", embedded.INSTALL_COMMAND)
    if folder.exists():
        return Check("ok", f"{installed.name} is installed; what was converted in {folder} is damaged and made anew")
    return Check("ok", f"{installed.name} is installed; converted at first use (ten seconds)")


def generation() -> Check:
    before = model()
    if before.status != "ok":
        return Check("missing", "no model to try", before.fix)
    try:
        result = subprocess.run([sys.executable, "-c", GENERATE], capture_output=True, encoding="utf-8",
                                errors="replace", stdin=subprocess.DEVNULL, timeout=GENERATE_SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired:
        return Check("problem", f"no answer in {GENERATE_SECONDS} s", 'nanoengine generate "The capital of France is"')
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"the process ended with {result.returncode}"]
        return Check("problem", lines[-1], 'NANOENGINE_DEBUG=1 nanoengine generate "The capital of France is"')
    answer = json.loads(result.stdout.splitlines()[-1])
    return Check("ok", f"The capital of France is{answer['text']!r}, {answer['tokens']} tokens, "
                       f"{answer['seconds']:.1f} s with loading")  # fmt: skip


def tokenizer() -> Check:
    from nanoengine.tokenizer.tokenizer import load_tokenizer

    folder, text = converted_folder(), "1234 + 5 = 1239, 分页注意力 ✓"
    if not folder.exists():
        return Check("missing", "comes with the model", model().fix or 'nanoengine generate "Hello"')
    loaded = load_tokenizer(folder)
    ids = loaded.encode(text)
    loaded.apply_chat_template([{"role": "user", "content": text}])
    if loaded.decode(ids) != text:
        return Check("problem", f"{text!r} comes back as {loaded.decode(ids)!r}", f"rm -r {quoted(folder)}")
    return Check("ok", f"{loaded.vocab_size} tokens, text and chat template come back whole")


def cache() -> Check:
    from nanoengine.loader.cache import cache_root

    folder = cache_root()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / 2**30
    detail = f"{folder}, {free:.1f} GiB free"
    if not os.access(there, os.W_OK) or not there.is_dir():
        return Check("problem", f"{detail}, but it cannot be written", "export NANOENGINE_CACHE=/a/folder/of/yours")
    if free < 1.5 and not converted_folder().exists():
        return Check("problem", f"{detail}: 1.5 are needed", "export NANOENGINE_CACHE=/a/larger/disk")
    return Check("ok", detail)


def index() -> Check:
    """Where packages and models would come from. Asks nobody: only the settings are read."""
    pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, encoding="utf-8",
                         errors="replace", stdin=subprocess.DEVNULL, timeout=20)  # fmt: skip
    if pip.returncode:
        return Check("problem", "pip does not run here", f"{PYTHON} -m ensurepip")
    settings = dict(re.findall(r"^\S*?\.?([\w-]+)='(.*)'$", pip.stdout, re.MULTILINE))
    pages = settings.get("index-url", "https://pypi.org/simple (default)")
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co (default)")
    offline = ", HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
    return Check("ok", f"pip: {without_secrets(pages)}; hub: {without_secrets(hub)}{offline} (not tried)")


def without_secrets(url: str) -> str:
    """An address without the name and password that may stand in it."""
    return re.sub(r"://[^/@\s]*@", "://", url)
