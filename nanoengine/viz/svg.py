"""Drawing without a library: numbers, text and shapes become SVG. Colours, textures and themes live here.

Shapes carry the light theme's colours as plain attributes, so that the picture is whole where CSS is stripped;
a small style sheet maps the neutral ones to the dark theme.
"""

from __future__ import annotations

from nanoengine.markup import escape

# Okabe and Ito's palette for colour-blind readers (jfly.uni-koeln.de/color), black left to the text.
OKABE_ITO = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#F0E442")

# name: (light, dark); the dark greys keep at least 4.5:1 for text on the dark background
NEUTRAL = {
    "bg": ("#ffffff", "#16191f"),
    "panel": ("#f6f7f9", "#1e222a"),
    "ink": ("#1d2330", "#e8eaef"),
    "muted": ("#59616f", "#a4adbb"),
    "line": ("#d5dae1", "#3a414d"),
    "strong": ("#8b94a3", "#6d7787"),
}
BG, PANEL, INK, MUTED, LINE, STRONG = (light for light, _ in NEUTRAL.values())
FONT = (
    "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'Noto Sans','PingFang SC','Hiragino Sans GB',"
    "'Microsoft YaHei','Noto Sans CJK SC',sans-serif"
)
MIN_TEXT = 11  # px; nothing is written smaller

_NARROW = frozenset("iljtfrI.,:;'|!()[]{}/\\ ·")
_WIDE = frozenset("mwMW@%—→≥")


def colour(number: int) -> str:
    """The colour of the n-th sequence; the eighth has the first one's again, but another letter."""
    return OKABE_ITO[number % len(OKABE_ITO)]


def text_width(text: str, size: float = 12, bold: bool = False) -> float:
    """About how wide a text is drawn, in px; rather too wide than too narrow."""
    units = 0.0
    for char in text:
        if ord(char) >= 0x2E80:  # Chinese characters and their punctuation
            units += 1.0
        elif char in _NARROW:
            units += 0.34
        elif char in _WIDE:
            units += 0.92
        else:
            units += 0.68 if char.isupper() else 0.575
    return units * size * (1.1 if bold else 1.0)


def fit(text: str, width: float, size: float = 12) -> str:
    """The text, cut with an ellipsis where it is wider than ``width`` px."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap(text: str, width: float, size: float = 12) -> list[str]:
    """Lines of at most ``width`` px: broken at blanks, and between Chinese characters."""
    lines, line = [], ""
    for piece in _pieces(text):
        if line and text_width(line + piece.rstrip(), size) > width:
            lines.append(line.rstrip())
            line = piece.lstrip()
        else:
            line += piece
    return [*lines, line.rstrip()] if line.strip() else lines


def _pieces(text: str) -> list[str]:
    """Where a line may break: after a blank, and around a Chinese character, but not before punctuation."""
    pieces: list[str] = []
    for char in text:
        wide = ord(char) >= 0x2E80
        closing = char in "\u3002\uff0c\uff1a\uff1b\uff09\u3001\uff1f\u300d"
        if not pieces or (not closing and (wide or pieces[-1][-1] == " " or ord(pieces[-1][-1]) >= 0x2E80)):
            pieces.append(char)
        else:
            pieces[-1] += char
    return pieces


def num(value: float) -> str:
    """At most one decimal, none where it is zero: 12, 12.5."""
    return f"{value:.1f}".removesuffix(".0")


class Canvas:
    """Collects SVG elements. ``prefix`` goes before each id, so that two pictures on a page do not clash."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.parts: list[str] = []
        self.textures: set[str] = set()

    def rect(self, x, y, w, h, fill="none", *, rx=0.0, stroke=None, width=1.0, dash=None, opacity=None) -> None:
        more = f' rx="{num(rx)}"' if rx else ""
        more += f' stroke="{stroke}"' if stroke else ""
        more += f' stroke-width="{num(width)}"' if stroke and width != 1 else ""
        more += f' stroke-dasharray="{dash}"' if dash else ""
        more += f' fill-opacity="{opacity}"' if opacity is not None else ""
        self.parts.append(f'<rect x="{num(x)}" y="{num(y)}" width="{num(w)}" height="{num(h)}" fill="{fill}"{more}/>')

    def texture(self, x, y, w, h, name: str, rx=0.0) -> None:
        """Cover a shape with "hatch", "dots" or "cross"."""
        self.textures.add(name)
        self.rect(x, y, w, h, f"url(#{self.prefix}-{name})", rx=rx)

    def line(self, x1, y1, x2, y2, stroke=LINE, *, width=1.0, dash=None) -> None:
        more = f' stroke-dasharray="{dash}"' if dash else ""
        more += f' stroke-width="{num(width)}"' if width != 1 else ""
        self.parts.append(f'<path d="M{num(x1)} {num(y1)}L{num(x2)} {num(y2)}" stroke="{stroke}"{more}/>')

    def path(self, d: str, *, fill="none", stroke=None, width=1.0) -> None:
        more = f' stroke="{stroke}"' if stroke else ""
        more += f' stroke-width="{num(width)}"' if stroke and width != 1 else ""
        self.parts.append(f'<path d="{d}" fill="{fill}"{more}/>')

    def text(self, x, y, text, size=12, *, fill=None, bold=False, anchor=None) -> None:
        more = f' fill="{fill}"' if fill else ""
        more += ' font-weight="600"' if bold else ""
        more += f' text-anchor="{anchor}"' if anchor else ""
        more += f' font-size="{num(max(size, MIN_TEXT))}"' if size != 12 else ""
        self.parts.append(f'<text x="{num(x)}" y="{num(y)}"{more}>{escape(text, quote=False)}</text>')

    def badge(self, x, y, size, letter: str, number: int) -> None:
        """A sequence's sign: its letter on its colour."""
        self.rect(x, y, size, size, colour(number), rx=4, stroke=colour(number), opacity=0.32)
        points = 12 if len(letter) < 2 else MIN_TEXT
        self.text(x + size / 2, y + size / 2 + points * 0.36, letter, points, bold=True, anchor="middle")


def document(canvas: Canvas, width: float, height: float, title: str, description: str, theme: str, lang: str) -> str:
    """The SVG of what a canvas holds. theme: "auto" (follows JupyterLab, else the system), "light" or "dark"."""
    uid, body = canvas.prefix, "".join(canvas.parts)
    textures = "".join(_TEXTURES[name].format(id=f"{uid}-{name}", ink=INK) for name in sorted(canvas.textures))
    head = f"<defs>{textures}</defs>" if textures else ""
    if theme == "auto":
        head = f"<style>{_style(uid)}</style>" + head
    elif theme == "dark":
        for light, dark in NEUTRAL.values():
            head, body = head.replace(f'"{light}"', f'"{dark}"'), body.replace(f'"{light}"', f'"{dark}"')
    ink, bg = (NEUTRAL[name][theme == "dark"] for name in ("ink", "bg"))
    w, h = num(width), num(height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" id="{uid}" role="img" aria-labelledby="{uid}-t {uid}-d" '
        f'lang="{"zh-CN" if lang == "zh" else "en"}" width="{w}" height="{h}" viewBox="0 0 {w} {h}" '
        f'style="max-width:100%;height:auto" font-family="{FONT}" font-size="12">'
        f'<title id="{uid}-t">{escape(title, quote=False)}</title>'
        f'<desc id="{uid}-d">{escape(description, quote=False)}</desc>{head}'
        f'<rect width="{w}" height="{h}" rx="8" fill="{bg}"/><g fill="{ink}">{body}</g></svg>'
    )


_TEXTURES = {
    "hatch": '<pattern id="{id}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V6" stroke="{ink}" stroke-width="2.4" stroke-opacity=".3"/></pattern>',
    "dots": '<pattern id="{id}" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<circle cx="1.5" cy="1.5" r=".8" fill="{ink}" fill-opacity=".3"/></pattern>',
    "cross": '<pattern id="{id}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 3.5H7M3.5 0V7" stroke="{ink}" stroke-opacity=".4"/></pattern>',
}


def _style(uid: str) -> str:
    """Neutral colours as variables: the system's theme, overruled by the one that JupyterLab says it shows."""
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in NEUTRAL.items()) for i in (0, 1))
    rules = [
        f"#{uid}{{{light}}}",
        f"@media (prefers-color-scheme:dark){{#{uid}{{{dark}}}}}",
        f"[data-jp-theme-light=true] #{uid}{{{light}}}",
        f"[data-jp-theme-light=false] #{uid}{{{dark}}}",
    ]
    for name, (value, _) in NEUTRAL.items():
        rules.append(f'#{uid} [fill="{value}"]{{fill:var(--{name})}}')
        rules.append(f'#{uid} [stroke="{value}"]{{stroke:var(--{name})}}')
    return "".join(rules)
