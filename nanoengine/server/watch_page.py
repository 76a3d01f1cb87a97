"""The page of ``nanoengine trace watch``: one picture, a slider over the steps at hand, and "live"."""

from __future__ import annotations

import json

from nanoengine.markup import escape
from nanoengine.viz.page import document
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
    names = {key: escape(label(lang, key)) for key in ("back", "forward", "slider")}
    body = _BODY.format(address=escape(address), live=escape(words["live"]), live_hint=escape(words["live_hint"]),
                        **names)  # fmt: skip
    script = _SCRIPT.format(**{name: json.dumps(words[name]) for name in ("none", "gone", "since")})
    return document(lang, words["title"], body, script, _STYLE)


_STYLE = """h1 { margin: 0; }
p { margin: 0 0 12px; overflow-wrap: anywhere; }
#picture { overflow-x: auto; }
"""

_BODY = """<p>{address}</p>
<nav>
<label title="{live_hint}"><input id="live" type="checkbox" checked> {live}</label>
<button id="back" aria-label="{back}" title="{back}">&#9664;</button>
<input id="step" type="range" min="0" max="0" value="0" aria-label="{slider}">
<button id="forward" aria-label="{forward}" title="{forward}">&#9654;</button>
<output id="number" for="step"></output>
</nav>
<p id="note" role="status"></p>
<div id="picture"></div>
"""

_SCRIPT = """const at = id => document.getElementById(id), slider = at("step"), live = at("live");
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
"""
