"""Chinese punctuation as print has it; code, links, formulas and English stay as typed."""

import re
from pathlib import Path

import nbformat
import pytest

from nanoengine.course.phrases import say
from nanoengine.course.text import Text, html, plain, unfold
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
        ("要 ceil((已算 + 要算) / 块大小)块;O(块数)次", "要 ceil((已算 + 要算) / 块大小)块；O(块数)次"),  # formulas
        ("半块:(块大小 - 1) / 2,即 余量 ÷ (块大小 × 4)", "半块：(块大小 - 1) / 2，即 余量 ÷ (块大小 × 4)"),
        ("占整卡的(1 - 份额),2(K 和 V)× 层数", "占整卡的（1 - 份额），2（K 和 V）× 层数"),
        ("叫**槽**(slot),三个 token(比如**草稿** token)", "叫**槽**（slot），三个 token（比如**草稿** token）"),
        ("降到 O(n)?\n- 256 个 token;\n**比 token**;", "降到 O(n)？\n- 256 个 token；\n**比 token**；"),
        ("`split()`;GB 是 10**9,GiB 不是", "`split()`；GB 是 10**9，GiB 不是"),
        ("start += len(new);new = 新的 | n(n+1)/2,O(n²) |", "start += len(new)；new = 新的 | n(n+1)/2，O(n²) |"),
        ("见 https://a.b/c,或 HF_ENDPOINT=https://x", "见 https://a.b/c，或 HF_ENDPOINT=https://x"),
        ("33 / 16 的上整是 3 > 2;33 % 16 = 1", "33 / 16 的上整是 3 > 2；33 % 16 = 1"),  # parts no number
        ("块大小 16,32 个 token,共 1,024 个", "块大小 16，32 个 token，共 1,024 个"),
        ("plain English, yes (really)?", "plain English, yes (really)?"),
    ],
)
def test_marks(typed, said):
    assert chinese(typed) == said
    assert chinese(said) == said


def test_a_folded_line_loses_its_blank_and_code_keeps_its_own():
    assert unfold("先看, 再写。 然后 `f(键, 词)` 或者 `a`, `b`") == "先看,再写。然后 `f(键, 词)` 或者 `a`, `b`"


def test_labels_of_the_forms_are_typeset():
    assert say("several", "zh") == "（多选）"
    assert say("reread", "zh", places=say("enumerate", "zh").join(["甲", "乙"])) == "→ 回看：甲、乙"
    assert say("label", "zh", name=say("stop_talking", "zh")) == "讲到哪里打住："
    assert plain("<p>用 <code>step</code>、<strong>块</strong>，</p><p>然后</p>") == "用 step、块， 然后"
    table = html("| | 甲 | 乙 |\n| --- | --- | --- |\n| 一 | 二 | 三 |\n| 四 | 五 | 六 |")
    assert plain(table) == "甲 | 乙 · 一 | 二 | 三 · 四 | 五 | 六"


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
