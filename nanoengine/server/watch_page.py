"""The page of ``nanoengine trace watch``: one picture, a slider over the steps at hand, and "live"."""

from __future__ import annotations

import json
from html import escape

from nanoengine.viz.svg import NEUTRAL
from nanoengine.viz.words import check_lang, label

WORDS = {
    "en": {
        "title": "A running engine",
        "live": "live",
        "live_hint": "follow the newest step",
        "none": "No step yet: send the server a request.",
        "gone": "No news: ",
        "since": ["step", "since the start"],
    },
    "zh": {
        "title": "正在运行的引擎",
        "live": "实时",
        "live_hint": "跟着最新的一步走",
        "none": "还没有步:给服务器发一个请求。",
        "gone": "没有新数据:",
        "since": ["启动以来第", "步"],
    },
}


def page(lang: str, address: str) -> str:
    """The HTML. ValueError for an unknown language."""
    check_lang(lang)
    words = WORDS[lang]
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in NEUTRAL.items()) for i in (0, 1))
    names = {key: escape(label(lang, key)) for key in ("back", "forward", "slider")}
    return _HTML.format(
        html_lang="zh-CN" if lang == "zh" else "en", light=light, dark=dark, address=escape(address),
        title=escape(words["title"]), live=escape(words["live"]), live_hint=escape(words["live_hint"]),
        none=json.dumps(words["none"]), gone=json.dumps(words["gone"]),
        since=json.dumps(words["since"]), **names,
    )  # fmt: skip


_HTML = """<!DOCTYPE html>
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
h1 {{ font-size: 18px; margin: 0; }}
p {{ margin: 0 0 12px; overflow-wrap: anywhere; }}
nav {{ display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin-bottom: 12px; }}
nav input[type=range] {{ flex: 1 1 220px; accent-color: #0072b2; }}
button {{ font: inherit; font-size: 14px; padding: 4px 12px; color: inherit; background: var(--bg);
  border: 1px solid var(--line); border-radius: 6px; }}
button:disabled {{ opacity: .45; }}
output {{ min-width: 3.5em; text-align: right; font-variant-numeric: tabular-nums; }}
#picture {{ overflow-x: auto; }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{address}</p>
<nav>
<label title="{live_hint}"><input id="live" type="checkbox" checked> {live}</label>
<button id="back" aria-label="{back}" title="{back}">&#9664;</button>
<input id="step" type="range" min="0" max="0" value="0" aria-label="{slider}">
<button id="forward" aria-label="{forward}" title="{forward}">&#9654;</button>
<output id="number" for="step"></output>
</nav>
<p id="note" role="status"></p>
<div id="picture"></div>
</main>
<script>
const at = id => document.getElementById(id), slider = at("step"), live = at("live");
let shown = null, wanted = null, busy = false;
const step = () => Number(slider.value);
async function show() {{
  wanted = step();
  at("number").dataset.step = wanted;  // the picture counts from the first step at hand
  at("number").textContent = [{since}[0], wanted, {since}[1]].join(" ");
  at("back").disabled = wanted <= Number(slider.min);
  at("forward").disabled = wanted >= Number(slider.max);
  if (busy) return;
  busy = true;
  try {{
    while (shown !== wanted) {{
      const next = wanted, svg = await (await fetch("/frame?step=" + next)).text();
      if (svg) at("picture").innerHTML = svg;
      shown = next;
    }}
  }} finally {{ busy = false; }}
}}
async function poll() {{
  try {{
    const state = await (await fetch("/state")).json();
    if (state.last === null) {{
      note(state.error ? {gone} + state.error : {none});
      if (shown !== null) {{ shown = null; at("picture").innerHTML = ""; }}
    }} else {{
      note(state.error ? {gone} + state.error : "");
      if (state.last < Number(slider.max)) shown = null;  // the server was started anew: other steps, same numbers
      slider.min = state.first;
      slider.max = state.last;
      if (live.checked) slider.value = state.last;
      await show();
    }}
  }} catch (error) {{ note({gone} + error.message); }}
  setTimeout(poll, 400);
}}
function note(text) {{ if (at("note").textContent !== text) at("note").textContent = text; }}
function go(to) {{ live.checked = false; slider.value = to; show(); }}
slider.oninput = () => go(slider.value);
at("back").onclick = () => go(step() - 1);
at("forward").onclick = () => go(step() + 1);
live.onchange = () => {{ if (live.checked) {{ slider.value = slider.max; show(); }} }};
poll();
</script>
</body>
</html>
"""
