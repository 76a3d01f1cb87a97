"""What the course's widgets and forms say, in both languages. Texts of lessons are not here but in their YAML."""

from __future__ import annotations

from nanoengine.course.text import Text
from nanoengine.shown import counted

PHRASES: dict[str, Text] = {
    "one": Text("(one answer)", "(单选)"),
    "several": Text("(one or more answers)", "(多选)"),
    "answer": Text("Answer", "提交"),
    "again": Text("Try again", "重做"),
    "pick": Text("Choose first, then answer.", "先选,再提交。"),
    "right": Text("Right.", "答对了。"),
    "wrong": Text("Not quite.", "不对。"),
    "option_right": Text("right", "对"),
    "option_wrong": Text("wrong", "错"),
    "reread": Text("→ read again: {places}", "→ 回看:{places}"),
    "score": Text(
        "{right} of {done} right, {left} to go; {need} pass.", "答对 {right}/{done},还剩 {left} 题;{need} 题过关。"
    ),
    "score_none": Text("{of:question}; {need} right pass.", "共 {of} 题,答对 {need} 题过关。"),
    "passed": Text("{right} of {of} right: passed.", "答对 {right}/{of}:过关。"),
    "failed": Text(
        "{right} of {of} right, {need} pass. Read what the wrong ones point at, then try again.",
        "答对 {right}/{of},{need} 题才过关。按提示回看,再来一遍。",
    ),
    "saved": Text("Saved.", "已保存。"),
    "not_saved": Text(
        "Not saved: there is no progress file here. `make lab` makes one.",
        "没有保存:这里没有进度文件。用 `make lab` 打开就有了。",
    ),
    "enumerate": Text(", ", "、"),
    "label": Text("{name}: ", "{name}："),
    "level": Text("{name}.", "{name}："),
    "unfold": Text("Unfold: right answers and reasons", "展开:答案与理由"),
    "rubric": Text("Unfold: rubric", "展开:自评标准"),
    "show_rubric": Text("Show the rubric", "展开自评标准"),
    "unfold_answer": Text("Unfold: answer", "展开:答案"),
    "show_answer": Text("Answer", "看答案"),
    "show_source": Text("Source", "看源码"),
    "level_none": Text("not yet", "还不行"),
    "level_pass": Text("pass", "及格"),
    "level_good": Text("good", "良好"),
    "level_excellent": Text("excellent", "优秀"),
    "grade_yourself": Text("Grade yourself:", "给自己打分:"),
    "graded": Text("You gave yourself: {level}.", "自评:{level}。"),
    "time_left": Text("{time} left", "还剩 {time}"),
    "time_over": Text("time is up: finish the sentence", "时间到:把这句话说完"),
    "hunt_stop": Text("Stop {n}", "第 {n} 站"),
    "seconds_30": Text("30 seconds", "30 秒"),
    "minutes_3": Text("3 minutes", "3 分钟"),
    "say_short": Text("Say it aloud in 30 seconds, then look.", "先出声讲 30 秒,再看。"),
    "show_short": Text("30-second answer", "30 秒答法"),
    "show_long": Text("3-minute answer", "3 分钟答法"),
    "show_follow": Text("Follow-ups", "追问"),
    "stop_talking": Text("When to stop", "讲到哪里打住"),
    "follow_ups": Text("They will ask next", "面试官接着会问"),
    "again_1": Text("Again", "重来"),
    "again_2": Text("Hard", "吃力"),
    "again_3": Text("Good", "可以"),
    "again_4": Text("Easy", "轻松"),
    "next_card": Text("Next card", "下一张"),
    "card_of": Text("Card {n} of {of}", "第 {n}/{of} 张"),
    "due_now": Text("due now", "现在该复习"),
    "due_in": Text("Again in {time}.", "{time}后再复习。"),
    "all_done": Text("Nothing is due. Next card in {time}.", "现在没有要复习的。下一张在 {time}后。"),
    "minutes": Text("{n} min", "{n} 分钟"),
    "hours": Text("{n} h", "{n} 小时"),
    "days": Text("{n} d", "{n} 天"),
    "static": Text(
        "This is the still form. Run the cell to answer, to be timed, and to have it saved.",
        "这是静态版。运行这一格,才能作答、计时、保存。",
    ),
    "nothing_fits": Text(
        "Nothing in the course fits this question well enough to be shown as an answer.",
        "课程里没有和这个问题对得上的内容,不拿不相干的来凑。",
    ),
    "unknown_words": Text("It never mentions: {words}.", "课程里没出现过:{words}。"),
    "ask_hint": Text(
        "Use the words of the lesson (block, prefill, step …), or the name of a function.",
        "换成课程里的词(块、prefill、一步……),或者直接写函数名试试。",
    ),
    "kind_section": Text("lesson {no}", "第 {no} 课"),
    "kind_faq": Text("lesson {no}, asked before", "第 {no} 课,常见问题"),
    "kind_card": Text("lesson {no}, interview card", "第 {no} 课,面试卡"),
    "kind_source": Text("source", "源码"),
    "kind_cited": Text("{engine} {version}", "{engine} {version}"),
    "kind_topic": Text("out of the course's scope", "课程范围之外"),
    "interview_intro": Text(
        "{cards:question}, {minutes:minute}. Say each answer aloud: first 30 seconds, then on until you would stop.",
        "{minutes} 分钟,{cards} 道题。每题都出声回答:先讲 30 秒,再往下讲,讲到该打住为止。",
    ),
    "interview_few": Text(
        "Only {cards:card} so far: about {minutes:minute}.", "目前只有 {cards} 张卡,大约 {minutes} 分钟。"
    ),
    "interview_begin": Text("Begin", "开始"),
    "interview_enter": Text("Press Enter when you have answered …", "答完按回车……"),
    "interview_took": Text("You took {time}.", "用时 {time}。"),
    "interview_follow": Text("Follow-up", "追问"),
    "interview_grade": Text("1 lost · 2 shaky · 3 sound · 4 would hire", "1 没答上 · 2 磕绊 · 3 扎实 · 4 想要这个人"),
    "interview_your_grade": Text("Your grade, 1-4: ", "自评 1-4:"),
    "interview_bad_grade": Text("Type 1, 2, 3 or 4.", "请输入 1、2、3 或 4。"),
    "interview_next": Text("Next", "下一题"),
    "interview_over": Text(" (over time)", "(超时)"),
    "interview_sum": Text(
        "{cards:question}, {time}, mean grade {mean:.1f} of 4, {over} over time.",
        "{cards} 道题,{time},平均 {mean:.1f}/4,{over} 道超时。",
    ),
    "interview_rubric": Text("Rubric", "评分标准"),
    "interview_early": Text("Ended early.", "提前结束。"),
}

# How an interviewer listens; each line is a habit that can be seen from outside.
INTERVIEW_RUBRIC: tuple[Text, ...] = (
    Text(
        "**Answer first.** The first sentence answers the question; the reasons come after it.",
        "**先给结论。** 第一句话就回答问题,理由放后面。",
    ),
    Text(
        "**Exact.** Every number has a unit and says what is counted; every claim says of which engine it is true.",
        "**说准。** 每个数带单位、说清数的是什么;每个说法讲明对哪个引擎成立。",
    ),
    Text(
        "**A mechanism, not a name.** It could be drawn on a whiteboard by somebody who only heard you.",
        "**讲机制,不报名词。** 别人只听你说,就能在白板上画出来。",
    ),
    Text(
        "**The limit.** You said when it does not help, before being asked.",
        "**讲边界。** 没等人问,先说什么时候它帮不上忙。",
    ),
    Text(
        "**You stopped.** The 30-second answer ended in 30 seconds and left a door open for the next question.",
        "**收得住。** 30 秒的答案 30 秒讲完,并且留了口子等人追问。",
    ),
)


class _Number(int):
    """``{n:question}`` in a phrase: 1 question, 2 questions."""

    def __format__(self, spec: str) -> str:
        return counted(self, spec) if spec.isalpha() and len(spec) > 1 else format(int(self), spec)


def say(key: str, lang: str, **values) -> str:
    """A phrase with its values filled in."""
    numbers = {name: _Number(value) if type(value) is int else value for name, value in values.items()}
    return PHRASES[key][lang].format(**numbers)
