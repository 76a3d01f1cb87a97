"""Makes the pictures in a saved notebook visible where the notebook is not trusted.

JupyterLab takes ``<svg>`` out of the HTML of a notebook that its reader has not run yet (4.6; its sanitiser allows
``<img>`` with a data address). So a build saves each inline SVG as such an image; a cell that is run shows the SVG.
"""

from __future__ import annotations

import base64
import html
import re
from typing import Any

from nanoengine.markup import escape

_SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
_XMLNS = 'xmlns="http://www.w3.org/2000/svg"'


def freeze_pictures(data: dict[str, Any]) -> None:
    """Replace, in place, the SVG of one output's MIME bundle by images that need no trust."""
    if isinstance(data.get("text/html"), str):
        data["text/html"] = _SVG.sub(lambda m: svg_as_image(m[0]), data["text/html"])
    if "image/svg+xml" in data and "text/html" not in data:
        found = _SVG.search(data.pop("image/svg+xml"))
        if found is not None:
            data["text/html"] = svg_as_image(found[0])


def svg_as_image(svg: str) -> str:
    """An ``<img>`` with the SVG as its address; its title and description become the alternative text."""
    texts = (re.search(rf"<{tag}\b[^>]*>(.*?)</{tag}>", svg, re.DOTALL) for tag in ("title", "desc"))
    alt = ". ".join(html.unescape(found[1]).strip().rstrip(".") for found in texts if found)
    if "xmlns=" not in svg[: svg.index(">")]:
        svg = svg.replace("<svg", f"<svg {_XMLNS}", 1)
    address = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(alt)}" src="{address}">'
