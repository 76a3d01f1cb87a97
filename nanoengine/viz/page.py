"""A run as one HTML file: a slider, buttons, every step's picture; no kernel, no network."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Sequence as Steps
from pathlib import Path

from nanoengine.markup import escape
from nanoengine.viz.frames import key_steps, language
from nanoengine.viz.picture import PANES, check_panes, render
from nanoengine.viz.state import JUMPS, History
from nanoengine.viz.svg import NEUTRAL
from nanoengine.viz.words import check_lang, label

MAX_STEPS = 2000


def trace_html(
    trace: Steps[dict] | History, path: str | Path, lang: str | None = None, *, panes: Steps[str] = PANES
) -> Path:
    """Write the page, about a kilobyte a step.

    Raises:
        ValueError: an empty trace, one of more than 2,000 steps, an unknown language or pane.
    """
    history = trace if isinstance(trace, History) else History(trace)
    lang = lang or language()
    check_lang(lang)
    check_panes(panes)
    if len(history) > MAX_STEPS:
        raise ValueError(f"the trace has {len(history)} steps, a page holds {MAX_STEPS}: pass trace[:{MAX_STEPS}]")
    frames = [render(history.at(i), lang, panes=panes) for i in range(len(history))]
    path = Path(path)
    path.write_text(_page(history, frames, lang), encoding="utf-8")
    return path


def _page(history: History, frames: list[str], lang: str) -> str:
    jumps = {kind: history.jumps(kind) for kind in ("any", *JUMPS)}
    options = "".join(f'<option value="{kind}">{escape(label(lang, f"jump_{kind}"))}</option>' for kind in jumps)
    names = {key: escape(label(lang, key)) for key in ("play", "back", "forward", "jump", "slider")}
    body = _BODY.format(**names, options=options, last=len(frames) - 1, still=frames[key_steps(history, 1)[0]])
    script = _SCRIPT.format(last=len(frames) - 1, jumps=json.dumps(jumps), packed=_pack(frames))
    return document(lang, label(lang, "page_title"), body, script)


def document(lang: str, title: str, body: str, script: str, style: str = "") -> str:
    """A page in the pictures' colours, light and dark, with nothing from the net. body, script, style: as they are."""
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in NEUTRAL.items()) for i in (0, 1))
    return _DOCUMENT.format(html_lang="zh-CN" if lang == "zh" else "en", title=escape(title), light=light, dark=dark,
                            style=style, body=body, script=script)  # fmt: skip


def _pack(frames: list[str]) -> str:
    """Most elements of a picture stand in the one before as well: each is kept once, a frame is a list of numbers."""
    numbers: dict[str, int] = {}
    lists = []
    for frame in frames:
        # Only one picture is in the page at a time, so that all may share their ids.
        frame = frame.replace(re.search(r' id="(ne[0-9a-f]+)"', frame)[1], "run")
        lists.append([numbers.setdefault(part, len(numbers)) for part in re.split(r"(?<=>)", frame)])
    data = json.dumps({"parts": list(numbers), "frames": lists}, ensure_ascii=False, separators=(",", ":"))
    # mtime 0: the same trace gives the same file.
    return base64.b64encode(gzip.compress(data.encode(), mtime=0)).decode()


_DOCUMENT = """<!DOCTYPE html>
<html lang="{html_lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
body {{ margin: 0; background: var(--panel); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 760px; margin: 0 auto; padding: 20px 12px 40px; }}
h1 {{ font-size: 18px; margin: 0 0 12px; }}
nav {{ display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin-bottom: 12px; }}
nav input[type=range] {{ flex: 1 1 220px; accent-color: #0072b2; }}
button, select {{ font: inherit; font-size: 14px; padding: 4px 12px; color: inherit; background: var(--bg);
  border: 1px solid var(--line); border-radius: 6px; }}
button:disabled {{ opacity: .45; }}
output {{ min-width: 3.5em; text-align: right; font-variant-numeric: tabular-nums; }}
{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}</main>
<script>
{script}</script>
</body>
</html>
"""

_BODY = """<nav>
<button id="play" aria-label="{play}" title="{play}" aria-pressed="false">&#9654;</button>
<button id="back" aria-label="{back}" title="{back}">&#9664;</button>
<input id="step" type="range" min="0" max="{last}" value="0" aria-label="{slider}">
<button id="forward" aria-label="{forward}" title="{forward}">&#9654;&#65038;|</button>
<output id="number" for="step">0 / {last}</output>
<label>{jump} <select id="kind">{options}</select></label>
<button id="jump" aria-label="{jump}" title="{jump}">&#8677;</button>
</nav>
<div id="picture">{still}</div>
"""

_SCRIPT = """const jumps = {jumps}, packed = "{packed}", at = id => document.getElementById(id), slider = at("step");
let run = null, timer = null;
const step = () => Number(slider.value);
const next = () => jumps[at("kind").value].find(i => i > step());
function show(i) {{
  slider.value = i;
  at("picture").innerHTML = run.frames[step()].map(k => run.parts[k]).join("");
  at("number").textContent = step() + " / {last}";
  at("back").disabled = step() === 0;
  at("forward").disabled = step() === {last};
  at("jump").disabled = next() === undefined;
}}
function play(on) {{
  clearInterval(timer);
  timer = on ? setInterval(() => step() < {last} ? show(step() + 1) : play(false), 800) : null;
  at("play").setAttribute("aria-pressed", on);
  at("play").innerHTML = on ? "&#9208;&#65038;" : "&#9654;";
}}
slider.oninput = () => show(step());
at("back").onclick = () => show(step() - 1);
at("forward").onclick = () => show(step() + 1);
at("jump").onclick = () => show(next());
at("kind").onchange = () => show(step());
at("play").onclick = () => {{
  if (timer === null && step() === {last}) show(0);
  play(timer === null);
}};
const bytes = Uint8Array.from(atob(packed), c => c.charCodeAt(0));
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(stream).json().then(data => {{ run = data; show(0); }});
"""
