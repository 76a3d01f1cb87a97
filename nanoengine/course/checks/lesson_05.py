"""The two exercises of lesson 05."""

from __future__ import annotations

from nanoengine.course.checks import lesson_05_grow as grow
from nanoengine.course.checks import lesson_05_pool as pool
from nanoengine.course.checks.exercise import Exercise, Section
from nanoengine.engine.block_manager import BlockManager

GROW = Exercise(
    id="ex05a",
    name="grow_by",
    title=dict(en="The new-block boundary", zh="新块的边界"),
    section=Section("05", "ceiling-intro", dict(en="5 · When is a new block needed?", zh="5 · 什么时候要新块?")),
    hints=(
        dict(
            en="First the tokens, then the blocks. How many slots are there in all, if every free block were "
            "taken? How "
            "many of them are used?",
            zh="先定 token 数,再定块数。假如把空闲的块全拿来,一共有几个槽?其中用掉了几个?",
        ),
        dict(
            en="`(6, 9, 2, 1)` with size 4: (2 + 1) × 4 = 12 slots, 6 are used, so 6 of the 9 tokens get one. Then 12 "
            "tokens are written: they fill 3 blocks, 2 are owned, so take 1. Now say it with names.",
            zh="`(6, 9, 2, 1)`,块大小 4:一共 (2 + 1) × 4 = 12 个槽,用了 6 个,所以 9 个 token 里只有 6 个有槽。这样"
            "一共写了 12 个,要 3 块,手里有 2 块,再拿 1 块。把数字换成变量名。",
        ),
        dict(
            en="`tokens = min(wanted, (owned + free) * block_size - computed)`; blocks: `-(-(computed + tokens) // "
            "block_size) - owned`, but never below 0: a sequence may own more than it has filled.",
            zh="`tokens = min(wanted, (owned + free) * block_size - computed)`;块数 `-(-(computed + tokens) // "
            "block_size) - owned`,但不能小于 0:一条序列手里的块可能比写满的多。",
        ),
    ),
    run=grow.run_grow,
    boundaries=grow.BOUNDARIES,
    random_case=grow.random_case,
    smaller=grow.smaller,
    show=grow.show,
    forbidden=(BlockManager.grow, grow.written),
    num_random=200,
)

POOL = Exercise(
    id="ex05b",
    name="Pool",
    title=dict(en="A double free, repaired", zh="修好重复释放"),
    section=Section("05", "idea", dict(en="2 · Three structures", zh="2 · 三个结构")),
    hints=(
        dict(
            en="Read the trace backwards: B and C both have block 0. How could it stand in the free list "
            "twice? Which call "
            "put it there the second time, and what did it still find?",
            zh="倒着看记录:B 和 C 都拿着 0 号块。它怎么会在空闲链表里出现两次?第二次是哪个调用放进去的,它当时还"
            "找到了什么?",
        ),
        dict(
            en="`release`: take the table out of `tables` first, `self.tables.pop(name, [])`; a second call then finds "
            "nothing. And `== 0` in place of `<= 0`: a count below zero is a broken law, not a free block.",
            zh="`release`:先把块表从 `tables` 里拿走,`self.tables.pop(name, [])`,第二次调用就什么也找不到。再把"
            " `<= 0` 改成 "
            "`== 0`:计数小于零说明规矩破了,不是块空了。",
        ),
        dict(
            en="`allocate` has a fault of its own: it takes blocks until none is left and only then complains. Compare "
            "`count` with `len(self.free)` before the first one is taken.",
            zh="`allocate` 自己还有一个毛病:一路拿到没有了才抱怨。在拿第一块之前,先比较 `count` 和 `len(self.free)`。",
        ),
    ),
    run=pool.run_pool,
    boundaries=pool.BOUNDARIES,
    random_case=pool.random_case,
    smaller=pool.smaller,
    show=pool.show,
    explain=pool.explain,
    forbidden=(BlockManager.free, BlockManager.allocate, BlockManager.grow, pool.Promises.give),
    num_random=300,
)

EXERCISES = (GROW, POOL)
