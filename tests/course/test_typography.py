"""Chinese punctuation as print has it; code, links, formulas and English stay as typed."""

import re
from pathlib import Path

import nbformat
import pytest

from nanoengine.course.text import Text
from nanoengine.course.typography import chinese

LESSONS = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("先猜,再运行:第一步?", "先猜，再运行：第一步？"),
        ("**同样的延迟下**,token 更多", "**同样的延迟下**，token 更多"),  # emphasis stands between
        ("`schedule()`,然后 `a`:`b`", "`schedule()`，然后 `a`：`b`"),
        ("块表(block table)、块(12 GB)", "块表（block table）、块（12 GB）"),
        ("文件(在 `nanoengine/model/`)里", "文件（在 `nanoengine/model/`）里"),
        ("得到 (1, 2),应为 (3, 4)", "得到 (1, 2)，应为 (3, 4)"),  # a tuple is no aside
        ("O(n),这里 f(x) 是 1,024:1", "O(n)，这里 f(x) 是 1,024:1"),
        ("见[第 3 课](../a,b.ipynb),<a href='x:y'>此处</a>", "见[第 3 课](../a,b.ipynb)，<a href='x:y'>此处</a>"),
        ("共 {{ n:,}} 个,{got}:错", "共 {{ n:,}} 个，{got}：错"),
        ("代码:\n```\nf(a,b)  # 注释,不动\n```", "代码：\n```\nf(a,b)  # 注释,不动\n```"),
        ("1. (细讲。)\n- (再讲)", "1. （细讲。）\n- （再讲）"),  # the blank makes the list
        ("| 谁 | 否则: |\n| --- | :---: |", "| 谁 | 否则： |\n| --- | :---: |"),
        ("KV cache, prefix cache 两个", "KV cache, prefix cache 两个"),
        ("从 n²/2 降到 n;query-key 对", "从 n²/2 降到 n；query-key 对"),
        ("bf16:KV 从 23:00 起,1,024 个", "bf16：KV 从 23:00 起，1,024 个"),
        ("就是 ceil((computed + scheduled) / 块大小)块", "就是 ceil((computed + scheduled) / 块大小)块"),
        ("见 https://a.b/c,或 HF_ENDPOINT=https://x", "见 https://a.b/c，或 HF_ENDPOINT=https://x"),
        ("块大小 16,32 个 token,共 1,024 个", "块大小 16，32 个 token，共 1,024 个"),
        ("plain English, yes (really)?", "plain English, yes (really)?"),
    ],
)
def test_marks(typed, said):
    assert chinese(typed) == said
    assert chinese(said) == said


def test_a_text_of_the_course_is_typeset_when_it_is_said():
    text = Text("a, b", "甲,乙")
    assert (text["en"], text["zh"]) == ("a, b", "甲，乙")


def test_the_chinese_notebooks_have_no_half_width_mark_between_chinese_characters():
    marks = re.compile("[\u3400-\u9fff][,:;?!][\u3400-\u9fff]")
    left = []
    folders = "lessons", "exercises", "solutions"
    paths = [path for folder in folders for path in sorted(LESSONS.glob(f"{folder}/zh/*.ipynb"))]
    for path in paths:
        for cell in nbformat.read(path, 4).cells:
            texts = [cell.source] if cell.cell_type == "markdown" else []
            texts += ["".join(o["data"].get("text/html", "")) for o in cell.get("outputs", []) if "data" in o]
            texts = [re.sub("<(code|pre)[^>]*>.*?</\\1>", "", text, flags=re.DOTALL) for text in texts]
            left += [f"{path.name}, {cell.id}: {m[0]}" for text in texts for m in marks.finditer(text)]
    assert paths and left == []
