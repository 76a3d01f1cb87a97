"""Opens a notebook in JupyterLab in headless Chromium, as a reader would, and runs it.

By hand, from the project's folder: ``python tests/browser/lab.py lessons/01_slug.ipynb out.png``, or with the address
that ``make lab NO_BROWSER=1`` prints in place of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 90
# Chromium must not talk to anyone but the server on this machine.
BROWSER_ARGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    # All cells stay in the page, so that the whole notebook can be searched and photographed.
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}
_FINISHED = """() => {
    const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.textContent);
    return prompts.some(p => /\\d/.test(p)) && !prompts.some(p => p.includes('*'))
        && document.querySelector('.jp-Notebook-ExecutionIndicator[data-status=idle]') !== null;
}"""


def find_browser() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


class Lab:
    """One notebook open in JupyterLab. ``console_errors`` collects what the page complained about."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.console_errors: list[str] = []
        page.on("console", lambda m: self.console_errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.console_errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=START_SECONDS * 1000)
        # The notebook's own indicator says idle even before there is a kernel; the status bar does not.
        page.wait_for_selector("text=/ipykernel.* [|] Idle/", timeout=START_SECONDS * 1000)

    def run_all(self, seconds: float = 180) -> None:
        """Run all cells and wait until the kernel is idle again."""
        self.page.click('.lm-MenuBar-itemLabel:has-text("Run")')
        self.page.click('.lm-Menu-item[data-command="runmenu:run-all"]')
        self.page.wait_for_timeout(1000)  # until the cells are marked as waiting; they may still show older numbers
        self.page.wait_for_function(_FINISHED, timeout=seconds * 1000)

    def errors(self) -> list[str]:
        """The text of each error output in the notebook, and of what was written to stderr.

        JupyterLab renders both as the same type; a lesson has neither.
        """
        return self.page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts()

    def not_run(self) -> int:
        """How many code cells with code in them have not been executed."""
        prompts = self.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_inner_texts()
        return sum(not any(c.isdigit() for c in prompt) for prompt in prompts)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the window, made as high as the notebook where ``whole``."""
        if whole:
            height = self.page.evaluate(
                "Math.max(...[...document.querySelectorAll('.jp-Notebook, .jp-Notebook *')].map(e => e.scrollHeight))"
            )
            self.page.set_viewport_size({"width": self.page.viewport_size["width"], "height": min(height + 150, 16000)})
            # It was scrolled to the cell that ran last, and only cells in view are drawn.
            self.page.evaluate("document.querySelectorAll('.jp-WindowedPanel-outer').forEach(e => e.scrollTo(0, 0))")
            self.page.wait_for_timeout(2000)
        self.page.screenshot(path=path)


@contextmanager
def lab_session(notebook: Path, *, fresh: bool = True, width: int = 1280, dark: bool = False) -> Iterator[Lab]:
    """Start JupyterLab on a copy of a notebook, open it in Chromium, and end both afterwards.

    Args:
        notebook: the file; its own folder is not touched.
        fresh: take the outputs out of the copy first, so that what is seen was made in this session.
        width: of the window, in CSS pixels.
        dark: with JupyterLab's dark theme.

    Raises:
        RuntimeError: no Chromium, or the server did not start; the message holds the end of its log.
    """
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder), notebook, fresh, dark) as address:
        with browser_page(width) as page:
            yield Lab(page, address)


@contextmanager
def browser_page(width: int = 1280) -> Iterator[Page]:
    """An empty page in headless Chromium.

    Raises:
        RuntimeError: there is no Chromium.
    """
    browser_path = find_browser()
    if browser_path is None:
        raise RuntimeError("no Chromium found; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=BROWSER_ARGS)
        try:
            yield browser.new_page(viewport={"width": width, "height": 900})
        finally:
            browser.close()


@contextmanager
def attached(address: str, *, width: int = 1280) -> Iterator[Lab]:
    """Open a notebook in a JupyterLab that runs already; ``address`` ends in ``/lab/tree/…ipynb``."""
    with browser_page(width) as page:
        yield Lab(page, address)


@contextmanager
def _server(folder: Path, notebook: Path, fresh: bool, dark: bool) -> Iterator[str]:
    root = folder / "root"
    root.mkdir()
    _copy_notebook(notebook, root / notebook.name, fresh)
    port = _free_port()
    base = f"http://127.0.0.1:{port}"
    log_path = folder / "server.log"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={root}"]
    command += ["--LabApp.extension_manager=readonly"]
    with log_path.open("w") as log:
        server = subprocess.Popen(command, env=_environment(folder, dark), stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_for(base, server, log_path)
        yield f"{base}/lab/tree/{notebook.name}?reset"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _copy_notebook(source: Path, target: Path, fresh: bool) -> None:
    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells if fresh else ():
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, target)


def _environment(folder: Path, dark: bool) -> dict[str, str]:
    """Everything that Jupyter reads or writes about its user lies in ``folder``."""
    settings = dict(SETTINGS)
    if dark:
        settings["@jupyterlab/apputils-extension:themes"] = {"theme": "JupyterLab Dark"}
    overrides = folder / "config" / "labconfig" / "default_setting_overrides.json"
    overrides.parent.mkdir(parents=True)
    overrides.write_text(json.dumps(settings), encoding="utf-8")
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    return {**os.environ, **{name: str(folder / place) for name, place in places.items()}}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _wait_for(base: str, server: subprocess.Popen, log_path: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{base}/api", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError("JupyterLab did not start:\n" + log_path.read_text()[-3000:])


def main() -> int:
    """Run one notebook, write one picture; exit status 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", help="a file, or the address of one in a running JupyterLab")
    parser.add_argument("png", type=Path)
    parser.add_argument("--as-committed", action="store_true", help="do not run; show the outputs in the file")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    args = parser.parse_args()
    if args.notebook.startswith("http"):
        session = attached(args.notebook, width=args.width)
    else:
        session = lab_session(Path(args.notebook), fresh=not args.as_committed, width=args.width, dark=args.dark)
    with session as lab:
        if not args.as_committed:
            lab.run_all()
        lab.screenshot(args.png)
        for line in (*lab.errors(), *lab.console_errors):
            print(line)
        return 1 if lab.errors() else 0


if __name__ == "__main__":
    sys.exit(main())
