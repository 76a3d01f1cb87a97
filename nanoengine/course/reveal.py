"""reveal.js for slides that need no network, taken from the PyPI package ``sphinx-revealjs`` (for its files alone)."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

_DISTRIBUTION = "sphinx-revealjs"
_FONTS = re.compile(r"@import url\([^)]*\);")  # web fonts: the reader's own will do


class RevealMissing(RuntimeError):
    """reveal.js is not on this machine; the message says what to type."""


@dataclass(frozen=True)
class Reveal:
    """Text of the files that a page needs: styles and scripts, ready to stand in ``<style>`` and ``<script>``."""

    css: str
    script: str


def load_reveal() -> Reveal:
    """Read reveal.js, its white theme and its speaker notes.

    Raises:
        RevealMissing: the package is not installed.
    """
    spec = importlib.util.find_spec("sphinx_revealjs")  # found, never imported: it would want Sphinx
    if spec is None or spec.origin is None:
        raise RevealMissing(f"slides need reveal.js: type  pip install --no-deps {_DISTRIBUTION}  (make setup does it)")
    root = Path(spec.origin).parent / "_static" / "revealjs"
    css = [(root / name).read_text(encoding="utf-8") for name in ("dist/reveal.css", "dist/theme/white.css")]
    scripts = [(root / name).read_text(encoding="utf-8") for name in ("dist/reveal.js", "plugin/notes/notes.js")]
    # A script that holds "</script" as text would end its own element.
    script = "\n".join(text.replace("</script", "<\\/script") for text in scripts)
    return Reveal(_FONTS.sub("", "\n".join(css)), script)
