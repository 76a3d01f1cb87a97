"""The two exercises of lesson 03. Needs no torch until one of them is checked."""

from __future__ import annotations

from nanoengine.course.checks import lesson_03_attention as attention
from nanoengine.course.checks import lesson_03_batch as batch
from nanoengine.course.checks.exercise import Exercise, Section
from nanoengine.course.checks.lesson_01_ledger import weight_shapes

ATTENTION = Exercise(
    id="ex03a",
    name="cached_attention",
    title=dict(en="Cached attention for any chunk", zh="任意 chunk 的带缓存注意力"),
    section=Section("03", "yours-intro", dict(en="3 · Your version", zh="3 · 你来写一遍")),
    hints=(
        dict(
            en="Write first: `cache[0, start : start + n] = k`, the same for v. Then keys and values are the first "
            "start + n slots of the cache, whatever n is: prompt, chunk and decode are one case.",
            zh="先写:`cache[0, start : start + n] = k`,v 同理。然后 keys、values 就取缓存的前 start + n 个槽,n 是几"
            "都一样:prompt、chunk、decode 是同一种情况。",
        ),
        dict(
            en="Query i stands at position start + i. Compare positions: "
            "`torch.arange(start + n) <= torch.arange(start, start + n)[:, None]` is True where it may look.",
            zh="第 i 个 query 的位置是 start + i。拿位置来比:`torch.arange(start + n) <= torch.arange(start, start "
            "+ n)[:, None]`,True 的地方可以看。",
        ),
        dict(
            en="`keys.repeat_interleave(group, dim=1)` makes one key head for each query head. Scores: "
            '`torch.einsum("qhd,khd->hqk", q, keys) * scale`, -inf where it may not look, softmax over the last axis, '
            'then `torch.einsum("hqk,khd->qhd", weights, values)`.',
            zh="`keys.repeat_interleave(group, dim=1)` 给每个 query head 配一个 key head。打分:"
            '`torch.einsum("qhd,khd->hqk", q, keys) * scale`,不能看的 masked_fill 成 -inf,对最后一维 softmax,再 '
            '`torch.einsum("hqk,khd->qhd", weights, values)`。',
        ),
    ),
    run=attention.run_attention,
    boundaries=attention.BOUNDARIES,
    random_case=attention.random_case,
    smaller=attention.smaller,
    show=attention.show,
    forbidden=attention.PackageAnswers(),
)

BATCH = Exercise(
    id="ex03b",
    name="turning_batch",
    title=dict(en="The batch at which decode stops being bandwidth-bound", zh="batch 多大,decode 不再受带宽限制"),
    section=Section("03", "batch-intro", dict(en="8 · Can a batch lift it off the slope?",
                                              zh="8 · 加大 batch,能离开斜坡吗?")),  # fmt: skip
    hints=(
        dict(
            en="Two times, each linear in the batch. Bytes: a + b × batch (weights, and KV a sequence). FLOPs: c × "
            "batch. Put each over its rate.",
            zh="两个时间,都是 batch 的一次式。字节:a + b × batch(权重,加每条序列的 KV)。FLOP:c × batch。各除以自己的"
            "速率。",
        ),
        dict(
            en="c × batch / peak >= (a + b × batch) / bandwidth. Bring batch to one side: batch × (c / peak - b / "
            "bandwidth) >= a / bandwidth. If the bracket is not positive, no batch will do.",
            zh="c × batch / peak ≥ (a + b × batch) / bandwidth。把 batch 挪到一边:batch × (c / peak − b / "
            "bandwidth) ≥ a / bandwidth。括号不是正的,多大的 batch 都不行。",
        ),
        dict(
            en="Whole numbers avoid rounding: batch >= a × peak / (c × bandwidth - b × peak), `-(-x // y)` rounds "
            "up. Weights: `num_parameters()`, less vocab_size × hidden_size if the head is not tied.",
            zh="用整数就没有舍入:batch ≥ a × peak / (c × bandwidth − b × peak),`-(-x // y)` 向上取整。权重数"
            ":`num_parameters()`,头不共享时减去 vocab_size × hidden_size。",
        ),
    ),
    run=batch.run_batch,
    boundaries=batch.BOUNDARIES,
    random_case=batch.random_case,
    smaller=batch.smaller,
    show=batch.show,
    forbidden=(batch.search, weight_shapes),
)

EXERCISES = (ATTENTION, BATCH)
