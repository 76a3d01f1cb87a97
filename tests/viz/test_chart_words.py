"""Charts speak the reader's language, and are laid out for it."""

import re
import string
from pathlib import Path

import pytest

from nanoengine.course import lesson as current
from nanoengine.viz import chart_words, han, plots
from nanoengine.viz.roofline import roofline

LESSONS = Path(__file__).parents[2] / "lessons"
_HAN = re.compile("[\u3400-\u9fff]")


@pytest.fixture
def chinese(monkeypatch):
    monkeypatch.setattr(plots, "language", lambda: "zh")


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_chart_in_chinese_says_it_in_text_and_alternative(chinese):
    plot = plots.lines([1, 2, 4], {"no cache": [3, 6, 12], "cache": [3, 3, 3]}, xlabel="tokens generated",
                       ylabel="TFLOP in all", title="Qwen3-0.6B: work to generate n tokens")  # fmt: skip
    found = texts(plot.svg())
    assert {"没有缓存", "有缓存", "生成的 token 数", "Qwen3-0.6B：生成 n 个 token 的计算量"} <= set(found)
    assert "没有缓存 从 3 到 12" in plot.alt
    assert plot.svg() == plot.svg()


def test_bars_in_chinese_keep_their_order_and_numbers(chinese):
    plot = plots.bars({"static 4096": 81.5, "blocks of 16": 2.0}, unit="%", title="KV slots that never hold a token")
    found = texts(plot.svg())
    assert found.index("静态预留 4096") < found.index("每块 16")
    assert "静态预留 4096 81.5 %" in plot.alt
    assert found.count("%") == 0 and found.count("2 %") == 1  # the unit stands at each bar, not under them again


def test_nothing_of_the_layout_is_left_in_the_picture(chinese):
    plot = plots.lines([1], {"hit rate": [1]}, xlabel="turn", ylabel="blocks", title="Empty slots")
    assert not re.search("[\U0001f000-\U0001ffff]", plot.svg())
    assert plot.fig.axes[0].get_title(loc="left") == "空着的槽"  # and the figure is as it was


def test_chinese_takes_the_room_that_a_browser_will_give_it(chinese):
    def width(label: str) -> float:
        return float(re.search(r'width="([\d.]+)pt"', plots.bars({label: 1}, unit="%", title="t").svg())[1])

    names = "中" * 4, "国字" * 10
    assert 16 * 11 <= width(names[1]) - width(names[0]) <= 16 * 11 * 1.2  # 16 more of 11 points each, or a bit more


def test_more_characters_than_there_are_stand_ins_are_refused(chinese):
    many = "".join(chr(0x4E00 + i) for i in range(200))
    with pytest.raises(ValueError, match="200 different Chinese characters"):
        plots.bars({many: 1}, unit="", title="t").svg()


@pytest.mark.parametrize("label", ["a 🙂", "Ж", "naïve"])
def test_a_character_that_fonts_may_lack_is_refused(label):
    with pytest.raises(ValueError, match="may be in no font"):
        plots.bars({label: 1}, unit="", title="t")


def test_the_table_is_whole():
    for english, said in chart_words.CHINESE.items():
        assert english.isascii() and han.is_wide(said), english
        assert english.count("#") == said.count("#"), english
    assert not chart_words.SAME & chart_words.CHINESE.keys()


def test_every_label_of_the_chinese_lessons_is_chinese_or_left_so_on_purpose():
    """Reads the SVG that the committed notebooks show."""
    import base64

    import nbformat

    seen = 0
    for path in sorted(LESSONS.glob("zh/*.ipynb")):
        for cell in nbformat.read(path, 4).cells:
            for output in cell.get("outputs", []):
                html = "".join(output.get("data", {}).get("text/html", ""))
                for data in re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", html):
                    svg = base64.b64decode(data).decode()
                    if "matplotlib" not in svg:
                        continue
                    seen += 1
                    left = {chart_words.key(t) for t in texts(svg) if not _HAN.search(t)} - chart_words.SAME
                    left = {t for t in left if set(t) & set(string.ascii_letters)}
                    assert left == set(), f"{path.name}, cell {cell.id}: {left}: add them to chart_words.py"
    assert seen >= 7


def test_the_roofline_speaks_chinese(monkeypatch, chinese):
    plot = roofline({"this machine": (2e10, 1e11)}, {"this machine": {"B=1": 1.0}}, title="Roofline")
    assert {"这台机器", "屋顶线", "B=1"} <= set(texts(plot.svg()))
    assert current.current_lang() == "en"
