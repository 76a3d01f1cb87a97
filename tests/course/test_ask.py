"""ask(): finds what the course says, in either language, and says so where it says nothing."""

import pytest

from nanoengine.course.ask import ask
from nanoengine.course.corpus import Entry, entries, terms, words
from nanoengine.course.typography import chinese

# question -> what one of the finds must be called or contain
ANSWERED = {
    "why is sampling not in postprocess?": "Why is sampling not in postprocess?",
    "What became of step() in vLLM?": "What became of step() in vLLM?",
    "what does a step do?": "What does one step of the engine do?",
    "what happens to a preempted sequence?": "What does a preempted sequence lose?",
    "preemption": "What does a preempted sequence lose?",
    "when is a new block needed?": "When does a sequence need a new KV block?",
    "how many bytes is the KV of one token?": "How much KV memory does one token need",
    "why does nano-vllm not mix prefill and decode?": "nano-vllm",
    "what is a block table?": "What is a block, a slot, a block table?",
    "why is decode memory bound?": "Why is decode memory-bound",
    "what is max_num_seqs?": "Does max_num_seqs limit how many requests I may send?",
    "who pays when a long prompt arrives?": "What does an engine like vLLM do in each step?",
    "copy on write?": "Copy-on-write when a sequence forks",
    "where is admit_waiting?": "Scheduler.admit_waiting",
    "采样为什么不在 postprocess 里?": "采样为什么不在 postprocess 里?",
    "vLLM 里 step 变成什么样了?": "step() 在 vLLM 里变成什么样了?",
    "什么是抢占?": "被抢占的序列会丢什么?",
    "被抢占的序列会怎样?": "被抢占的序列会丢什么?",
    "什么时候要新块?": "什么时候要新块?",
    "一个 token 的 KV 占多少字节?": "一个 token 的 KV 要多少显存?",
    "nano-vllm 为什么不混跑 prefill 和 decode?": "nano-vllm 为什么把 prefill 和 decode 分成不同的步?",
    "块表是什么?": "块、槽、块表分别是什么?",
    "batch 越大越好吗?": "batch 加大,吞吐为什么会饱和?",
    "来了一条长 prompt 谁吃亏?": "vLLM 这类引擎的每一步在做什么?",
    "多 LoRA 怎么服务?": "多 LoRA",
    "max_num_seqs 是什么意思": "max_num_seqs 限制我能发多少个请求吗?",
}
UNRELATED = [
    "How do I cook rice?",
    "What is the weather in Shanghai tomorrow?",
    "who won the world cup",
    "recommend a movie",
    "how to write an Excel file in Python?",
    "What is backpropagation?",
    "how do I install Docker on Windows?",
    "translate hello into French",
    "how tall is Mount Everest",
    "what is a blockchain?",
    "what is quantum computing?",
    "how much does a ticket cost?",
    "今天上海天气怎么样?",
    "推荐一部电影",
    "怎么做红烧肉",
    "Python 怎么读写 Excel 文件",
    "世界杯谁赢了",
    "什么是反向传播?",
    "Docker 怎么装?",
    "把你好翻译成法语",
    "什么是区块链?",
    "量子计算是什么?",
    "这张票多少钱",
    "怎么写一份简历",
    "what is it?",
    "这是什么?",
]


@pytest.mark.parametrize(("question", "expected"), ANSWERED.items(), ids=ANSWERED)
def test_what_the_course_answers_is_found(question, expected):
    answer = ask(question)
    assert any(chinese(expected) in found.entry.title for found in answer.found), answer.text()
    assert 1 <= len(answer.found) <= 3


@pytest.mark.parametrize("question", UNRELATED)
def test_an_unrelated_question_gets_an_honest_no(question):
    answer = ask(question)
    assert answer.found == (), answer.text()
    said = "Nothing in the course fits" if answer.lang == "en" else "没有和这个问题对得上的内容"
    assert said in answer.text() and said in answer.html()


def test_the_no_names_the_words_that_the_course_never_uses():
    assert "It never mentions: weather, Shanghai." in ask("What is the weather in Shanghai?").text()
    assert "课程里没出现过：天气。" in ask("天气怎么样?").text()


def test_a_find_says_where_it_stands():
    answer = ask("why is sampling not in postprocess?")
    assert answer.found[0].entry.kind == "faq"
    text, html = answer.text(), answer.html()
    assert "lesson 01, asked before" in text and "ModelRunner.launch" in text
    assert "<b>Why is sampling not in postprocess?</b>" in html and "<code>nanoengine/worker/model_runner.py:" in html
    assert answer._repr_mimebundle_() == {"text/html": html, "text/plain": text}


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_find_says_nothing_twice(lang):
    for entry in entries(lang):
        assert len(set(entry.see)) == len(entry.see) and entry.title not in entry.place, entry


def test_the_answer_is_in_the_language_of_the_question():
    assert ask("块表是什么?").lang == "zh"
    assert "第 01 课" in ask("块表是什么?").text()
    assert ask("what is a block table?").lang == "en"


def test_fewer_can_be_asked_for_and_nothing_is_refused():
    assert len(ask("what is a block table?", limit=1).found) == 1
    with pytest.raises(ValueError, match="the question is empty"):
        ask("  ")


def test_terms_meet_across_forms_identifiers_and_languages():
    assert terms("preempted") == terms("preemption") == terms("preempts") == ["preempt"]
    assert {"num_computed_tokens", "comput", "token"} <= set(terms("num_computed_tokens"))
    assert {"blockmanager", "block", "manag"} <= set(terms("BlockManager"))
    assert terms("为什么要用块表?") == ["用块", "块表"]
    assert terms("what is it and why?") == []
    assert words("What is the weather in Shanghai?") == ["weather", "Shanghai"]


def test_html_in_a_find_is_shown_not_obeyed():
    from nanoengine.course.ask import Answer, Found

    entry = Entry("source", "<b>", "<i>x</i>", "", "<script>1</script>", ("<u>",))
    html = Answer("q", "en", (Found(entry, 1.0, 1.0),), ()).html()
    assert "<script" not in html and "<i>" not in html and "<u>" not in html
