"""The two exercises of lesson 04."""

from __future__ import annotations

from nanoengine.course.checks import lesson_04_runs as runs
from nanoengine.course.checks import lesson_04_waste as waste
from nanoengine.course.checks.exercise import Exercise, Section
from nanoengine.engine.batch import build_batch, span_slots

RUNS = Exercise(
    id="ex04a",
    name="slot_runs",
    title=dict(en="The slots of a prefill span", zh="一段 prefill 的槽"),
    section=Section("04", "source-intro", dict(en="3 · Open the source: who writes, who reads",
                                               zh="3 · 打开源码:谁写,谁读")),  # fmt: skip
    hints=(
        dict(
            en="Walk through the span one piece a block: from position p to the end of its block or to `end`, "
            "whichever "
            "comes first. Merge afterwards.",
            zh="一块一块地走:从位置 p 走到这一块的末尾,或者走到 `end`,先到哪个算哪个。合并放到后面做。",
        ),
        dict(
            en="At position p the slot is `block_table[p // block_size] * block_size + p % block_size`, and "
            "`block_size - p % block_size` slots are left in that block.",
            zh="位置 p 的槽是 `block_table[p // block_size] * block_size + p % block_size`,这一块里还剩"
            " `block_size - p % block_size` 个槽。",
        ),
        dict(
            en="A piece that begins at the slot where the last run ends (first + length) makes that run longer instead "
            "of a new one. Check `end > len(block_table) * block_size` before anything else.",
            zh="如果这一小段的第一个槽,正好是上一段的结尾(first + length),就把上一段加长,而不是新开一段。"
            "最先检查的是 `end > len(block_table) * block_size`。",
        ),
    ),
    run=runs.run_runs,
    boundaries=runs.BOUNDARIES,
    random_case=runs.random_case,
    smaller=runs.smaller,
    show=runs.show,
    explain=runs.explain,
    forbidden=(span_slots, build_batch, runs.painted),
    num_random=120,
)

WASTE = Exercise(
    id="ex04b",
    name="seats",
    title=dict(en="Static against paged", zh="静态预留对比分块"),
    section=Section("04", "naive-intro", dict(en="1 · First, a dumb version: one strip each",
                                              zh="1 · 先写一个「笨」的版本:一人一条")),  # fmt: skip
    hints=(
        dict(
            en="Both schemes are the same loop: how many slots does this request own, does it still fit, how "
            "many of them "
            "hold a token? Only the first question differs.",
            zh="两种方案是同一个循环:这个请求占几个槽?还放得下吗?其中几个放着 token?只有第一个问题的答案不同。",
        ),
        dict(
            en="Tokens with KV: `prompt + generated - 1`. Static owns `prompt + max_tokens - 1`; paged owns the tokens "
            "with KV, rounded up to whole blocks.",
            zh="有 KV 的 token:`prompt + generated - 1`。静态占 `prompt + max_tokens - 1`;分块占「有 KV 的 "
            "token 数」向上"
            "取整到整块。",
        ),
        dict(
            en="`-(-n // block_size) * block_size` rounds up. For paged the pool is `pool_slots // block_size "
            "* block_size` "
            "slots. `break` at the first request that does not fit.",
            zh="`-(-n // block_size) * block_size` 就是向上取整。分块时池子只有 `pool_slots // block_size * "
            "block_size` 个槽。"
            "遇到第一个放不下的就 `break`。",
        ),
    ),
    run=waste.run_waste,
    boundaries=waste.BOUNDARIES,
    random_case=waste.random_case,
    smaller=waste.smaller,
    show=waste.show,
    forbidden=(waste.seated,),
    num_random=120,
)

EXERCISES = (RUNS, WASTE)
