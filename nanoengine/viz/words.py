"""Every word that a picture says, in English and Chinese: a table a language, the same keys in both.

Chinese is written, not translated word by word. token, prompt, prefill, decode and KV stay English there, as engineers
say them.
"""

from __future__ import annotations

import re

LANGS = ("en", "zh")

# Short texts on the picture and on the player's buttons.
LABELS: dict[str, dict[str, str]] = {
    "en": {
        "title": "Engine, step {step} of {last}",
        "title_asking": "Engine before step {step} of {last}",
        "step": "Step {step}",
        "of": "of {last}",
        "token_budget": "policy: token budget",
        "prefill_first": "policy: prefill first",
        "own_policy": "policy: {policy}",
        "sizes": "budget {budget} tokens · {blocks} blocks × {size} tokens",
        "waiting": "Waiting",
        "running": "Running",
        "finished": "Finished",
        "progress": "tokens computed / known",
        "nobody": "nobody",
        "key_waiting": "waiting",
        "reason_stop": "end token",
        "reason_length": "length",
        "reason_abort": "aborted",
        "reason_error": "error",
        "pool": "KV pool",
        "pool_counts": "{used} in use · {cached} free but cached · {free} free",
        "key_ref": "small number: sequences that hold it",
        "key_ref_some": "small number: sequences that hold it, if more than one",
        "key_shared": "shared",
        "key_cached": "free but cached",
        "key_cached_whose": "free but cached (letter: who computed it)",
        "key_free": "free",
        "key_used": "in use",
        "pool_coarse": "{blocks} blocks, drawn by share: ref counts are left out",
        "pool_runs": "One letter marks a run of blocks; ref counts are left out",
        "table": "Block table of {who}",
        "table_none": "{who} holds no block now.",
        "logical": "logical",
        "slots": "slots",
        "physical": "block",
        "rows_more": "… {n} more rows …",
        "key_computed": "computed",
        "key_now": "this step",
        "key_room": "room",
        "batch": "Batch",
        "batch_of": "{used} of {budget} budget tokens",
        "batch_empty": "unused: {n}",
        "batch_scale": "widths not to scale",
        "batch_more": "+{n} more",
        "batch_hidden": "Step {step}: who runs next, and how many tokens of each?",
        "batch_hint": "{budget} tokens of budget · {free} free blocks · at most {seqs} sequences",
        "prefill": "prefill",
        "decode": "decode",
        "gantt": "Timeline",
        "gantt_more": "Not drawn: {n} more ({active} unfinished, {done} finished)",
        "idle": "pausing",
        "preempted": "preempted",
        "key_hit": "cache hit",
        "key_preempt": "preemption",
        "key_finish": "end",
        "more": "(+{n} more)",
        "and": " and ",
        "comma": ", ",
        "open": " (",
        "close": ")",
        "colon": ": ",
        "stop": ". ",
        "join": " ",
        # player
        "slider": "step",
        "play": "play",
        "pause": "pause",
        "back": "step back",
        "forward": "step forward",
        "speed": "speed",
        "jump": "next",
        "jump_admit": "admission",
        "jump_hit": "cache hit",
        "jump_preempt": "preemption",
        "jump_finish": "finish",
        "jump_any": "event",
        "no_more": "No more of these.",
        "show_table": "table of",
        "automatic": "newest event",
        "predict": "predict first",
        "reveal": "reveal",
        "left": "Left",
        "right": "Right",
        "static": "Static pictures of this run. Run the cell for the player with its slider and buttons.",
        "frame": "Step {step}",
        "page_title": "A run of the engine, step by step",
    },
    "zh": {
        "title": "引擎第 {step} 步(共到第 {last} 步)",
        "title_asking": "第 {step} 步调度之前(共到第 {last} 步)",
        "step": "第 {step} 步",
        "of": "/ {last}",
        "token_budget": "策略:统一 token 预算",
        "prefill_first": "策略:prefill 优先",
        "own_policy": "策略:{policy}",
        "sizes": "预算 {budget} token · {blocks} 块 × {size} token",
        "waiting": "等待",
        "running": "运行",
        "finished": "结束",
        "progress": "已算 / 已知 token",
        "nobody": "空",
        "key_waiting": "等待",
        "reason_stop": "遇到结束符",
        "reason_length": "到达长度上限",
        "reason_abort": "已取消",
        "reason_error": "出错",
        "pool": "KV 池",
        "pool_counts": "在用 {used} · 空闲但有缓存 {cached} · 空闲 {free}",
        "key_ref": "小数字:几条序列在用",
        "key_ref_some": "小数字:几条序列在用(多于一条才写)",
        "key_shared": "共享",
        "key_cached": "空闲但有缓存",
        "key_cached_whose": "空闲但有缓存(字母:谁算的)",
        "key_free": "空闲",
        "key_used": "在用",
        "pool_coarse": "共 {blocks} 块,按占比画,不标引用计数",
        "pool_runs": "连续的块只标一个字母,不标引用计数",
        "table": "{who} 的块表",
        "table_none": "{who} 现在不占任何块。",
        "logical": "逻辑块",
        "slots": "槽位",
        "physical": "物理块",
        "rows_more": "……中间还有 {n} 行……",
        "key_computed": "已算",
        "key_now": "本步在算",
        "key_room": "空位",
        "batch": "本步批次",
        "batch_of": "预算 {budget} token,用了 {used}",
        "batch_empty": "剩余 {n}",
        "batch_scale": "宽度不按比例",
        "batch_more": "另有 {n} 条",
        "batch_hidden": "第 {step} 步:接下来轮到谁?各算几个 token?",
        "batch_hint": "预算 {budget} token · 空闲 {free} 块 · 最多 {seqs} 条序列",
        "prefill": "prefill",
        "decode": "decode",
        "gantt": "时间线",
        "gantt_more": "还有 {n} 个请求没有画出(未完成 {active},已结束 {done})",
        "idle": "本步轮空",
        "preempted": "被抢占",
        "key_hit": "缓存命中",
        "key_preempt": "抢占",
        "key_finish": "结束",
        "more": "(另有 {n} 条)",
        "and": "、",
        "comma": "、",
        "open": "\uff08",
        "close": "\uff09",
        "colon": "\uff1a",
        "stop": "\u3002",
        "join": "",
        "slider": "步",
        "play": "播放",
        "pause": "暂停",
        "back": "后退一步",
        "forward": "前进一步",
        "speed": "速度",
        "jump": "跳到下一次",
        "jump_admit": "接纳",
        "jump_hit": "缓存命中",
        "jump_preempt": "抢占",
        "jump_finish": "结束",
        "jump_any": "任意事件",
        "no_more": "后面没有了。",
        "show_table": "块表",
        "automatic": "跟随事件",
        "predict": "先猜再看",
        "reveal": "揭晓",
        "left": "左",
        "right": "右",
        "static": "这是本次运行的静态画面。运行这个单元格,就能拖动滑块、逐步播放。",
        "frame": "第 {step} 步",
        "page_title": "引擎运行,一步一步看",
    },
}

# One sentence per kind of event, and for what a step without events does. {who} is a letter or a list of them.
SENTENCES: dict[str, dict[str, str]] = {
    "en": {
        "arrive": "{who} arrives with {prompt} prompt tokens and waits.",
        "arrive_many": "{who} arrive and wait.",
        "admit": "{who} starts: a slot is free and its {blocks} blocks fit.",
        "admit_many": "{who} start: slots are free and the {blocks} blocks they need fit.",
        "hit_others": "{who} finds {tokens} tokens in the prefix cache, left by others: not computed again.",
        "hit_own": "{who} finds {tokens} of its own earlier tokens in the prefix cache: not computed again.",
        "preempt": "{needed_by} needs a block and none is free: {who}, the last admitted, gives back {blocks} blocks "
        "and waits; its {computed} computed tokens are lost unless the cache still has them.",
        "preempt_self": "{who} needs a block and none is free: being the last admitted, it gives back its own {blocks} "
        "blocks and waits; its {computed} computed tokens are lost unless the cache still has them.",
        "finish_stop": "{who} ends with this step, by an end token or stop string, after {generated} tokens, "
        "and lets go of its blocks.",
        "finish_length": "{who} ends with this step, by its length limit, after {generated} tokens, "
        "and lets go of its blocks.",
        "finish_error": "{who} ends with this step, by an error, after {generated} tokens: its logits leave no token "
        "to draw. It lets go of its blocks, and what they hold leaves the prefix cache.",
        "abort": "{who} was aborted and lets go of its blocks.",
        "chunk": "{who}'s prompt is cut: the budget leaves it {tokens} of {wanted} tokens, the rest comes later.",
        "blocked_slots": "{who} waits: all {slots} places in the batch are taken.",
        "blocked_budget": "{who} waits: the budget of {budget} tokens is spent.",
        "blocked_preempt": "{who} waits: a step that preempts admits nobody.",
        "blocked_blocks": "{who} waits: its tokens fill {need} blocks, and the free ones number {free}.",
        "blocked_policy": "{who} waits, though its {need} blocks would fit into {free} free ones: "
        "the scheduler holds back.",
        "steady_decode": "Nobody comes or goes: every running sequence decodes one token ({rows} in all).",
        "steady_part": "Nobody comes or goes: {rows} of the {running} running sequences decode one token each.",
        "steady_prefill": "Nobody comes or goes: {tokens} prompt tokens are computed.",
        "steady_mixed": "Nobody comes or goes: {prefill} prompt tokens and {decode} decodes share the step.",
        "asking": "The scheduler is about to choose. Waiting: {waiting}. Running: {running}. Free blocks: {free}.",
    },
    "zh": {
        "arrive": "{who} 到了,prompt 有 {prompt} 个 token,先排队。",
        "arrive_many": "{who} 到了,先排队。",
        "admit": "{who} 开始运行:批里有空位,要的 {blocks} 个块也放得下。",
        "admit_many": "{who} 开始运行:批里有空位,一共要的 {blocks} 个块也放得下。",
        "hit_others": "{who} 的前 {tokens} 个 token 别人已经算过,前缀缓存命中,不用再算。",
        "hit_own": "{who} 的前 {tokens} 个 token 自己以前算过,前缀缓存里还在,不用再算。",
        "preempt": "{needed_by} 还要一个块,可是没有空闲块了:最晚进来的 {who} 让路,交回 {blocks} 个块,"
        "回去排队;它算过的 {computed} 个 token,缓存里找不到的就得重算。",
        "preempt_self": "{who} 还要一个块,可是没有空闲块了:它自己就是最晚进来的,只好交回 {blocks} 个块,"
        "回去排队;算过的 {computed} 个 token,缓存里找不到的就得重算。",
        "finish_stop": "{who} 走完这一步就结束:遇到结束符或停止串,共生成 {generated} 个 token,块随即归还。",
        "finish_length": "{who} 走完这一步就结束:到了长度上限,共生成 {generated} 个 token,块随即归还。",
        "finish_error": "{who} 走完这一步就结束:出错了,抽不出下一个 token,共生成 {generated} 个 token;"
        "块随即归还,里面的内容也从前缀缓存里删掉。",
        "abort": "{who} 被取消,块随即归还。",
        "chunk": "{who} 的 prompt 被切开:还差 {wanted} 个 token,预算只够算 {tokens} 个,剩下的以后再算。",
        "blocked_slots": "{who} 继续等:批里的 {slots} 个位置都占满了。",
        "blocked_budget": "{who} 继续等:{budget} 个 token 的预算已经用完。",
        "blocked_preempt": "{who} 继续等:发生抢占的这一步不接纳新序列。",
        "blocked_blocks": "{who} 继续等:它的 token 要占 {need} 个块,空闲的只有 {free} 个。",
        "blocked_policy": "{who} 继续等:它要占的 {need} 个块放得进 {free} 个空闲块,是调度器有意留着。",
        "steady_decode": "没有进出:运行中的 {rows} 条序列各 decode 一个 token。",
        "steady_part": "没有进出:运行中的 {running} 条序列里,有 {rows} 条各 decode 一个 token。",
        "steady_prefill": "没有进出:这一步算 {tokens} 个 prompt token。",
        "steady_mixed": "没有进出:{prefill} 个 prompt token 和 {decode} 个 decode 同在一步。",
        "asking": "调度器马上要做决定。等待:{waiting}。运行:{running}。空闲块:{free}。",
    },
}

_HAN = r"[\u3400-\u9fff\u3001\u3002]"
_ASCII_MARK = re.compile(rf"(?<={_HAN})[,:;?()]|[,:;?()](?={_HAN})")
_FULL_WIDTH = str.maketrans(",:;?()", "\uff0c\uff1a\uff1b\uff1f\uff08\uff09")


def check_lang(lang: str) -> None:
    if lang not in LANGS:
        raise ValueError(f"lang is {lang!r}; pictures speak {' and '.join(map(repr, LANGS))}")


def typeset(text: str, lang: str) -> str:
    """Chinese punctuation is as wide as a character; the tables above are typed with what keyboards have."""
    if lang != "zh":
        return text
    return _ASCII_MARK.sub(lambda m: m[0].translate(_FULL_WIDTH), text)


def label(lang: str, key: str, **values) -> str:
    """A short text of the picture."""
    check_lang(lang)
    return typeset(LABELS[lang][key].format(**values), lang)


def sentence(lang: str, key: str, **values) -> str:
    """A whole sentence. ValueError for a kind of event that the tables do not know."""
    check_lang(lang)
    if key not in SENTENCES[lang]:
        raise ValueError(f"no sentence for {key!r}; known: {', '.join(SENTENCES[lang])}")
    return typeset(SENTENCES[lang][key].format(**values), lang)


def listing(lang: str, names: list[str], limit: int = 8) -> str:
    """ "A, B and C"; the Chinese list is "A、B、C". Beyond ``limit`` the rest is counted."""
    if not names:
        return label(lang, "nobody")
    if len(names) > limit:
        shown = LABELS[lang]["comma"].join(names[:limit])
        return f"{shown} {label(lang, 'more', n=len(names) - limit)}"
    if len(names) == 1:
        return names[0]
    return LABELS[lang]["comma"].join(names[:-1]) + LABELS[lang]["and"] + names[-1]
