"""Every file and every pipe of text is opened in a named encoding: the locale's own differs from machine to machine."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENERS = ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile")
TEXT_PIPES = ("text", "universal_newlines")


def _unnamed(tree):
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in named or None in named:
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = getattr(function.value, "id", "") if isinstance(function, ast.Attribute) else ""
        if name in ("read_text", "write_text", "TextIOWrapper"):
            yield node.lineno
        elif name in OPENERS and owner != "webbrowser":
            if not _is_binary(node, named, name, owner):
                yield node.lineno
        elif any(getattr(named.get(flag), "value", False) is True for flag in TEXT_PIPES):
            yield node.lineno


def _is_binary(node, named, name, owner):
    first = 0 if isinstance(node.func, ast.Attribute) and owner not in ("os", "io", "gzip", "tempfile") else 1
    first = 0 if name.endswith("TemporaryFile") else first
    mode = named.get("mode") or (node.args[first] if len(node.args) > first else None)
    if mode is None:
        return name.endswith("TemporaryFile") 
    return not isinstance(mode, ast.Constant) or not isinstance(mode.value, str) or "b" in mode.value


def test_every_text_file_of_the_package_names_its_encoding():
    found = []
    for path in sorted((ROOT / "nanoengine").rglob("*.py")):
        lines = _unnamed(ast.parse(path.read_text(encoding="utf-8")))
        found += [f"{path.relative_to(ROOT)}:{line}" for line in lines]
    assert found == []


def test_the_search_finds_what_it_looks_for():
    bad = ["open('a')", "open('a', 'w')", "p.open()", "p.open('w')", "p.read_text()", "run(c, text=True)",
           "os.fdopen(3)", "p.write_text(t)", "run(c, universal_newlines=True)",
           "tempfile.NamedTemporaryFile('w')"]  # fmt: skip
    good = ["open('a', 'rb')", "p.open('wb')", "open('a', encoding='utf-8')", "run(c, encoding='utf-8')",
            "os.fdopen(3, 'wb')", "wheel.open(member)", "os.open(path, flags)", "tempfile.TemporaryFile()"]  # fmt: skip
    assert [list(_unnamed(ast.parse(text))) for text in bad] == [[1]] * len(bad)
    assert [list(_unnamed(ast.parse(text))) for text in good] == [[]] * len(good)
