"""The two exercises of lesson 06."""

from __future__ import annotations

from nanoengine.course.checks import lesson_06_index as index
from nanoengine.course.checks import lesson_06_order as order
from nanoengine.course.checks.exercise import Exercise, Section
from nanoengine.engine.block_manager import BlockManager

INDEX = Exercise(
    id="ex06a",
    name="PrefixIndex",
    title=dict(en="An index that cannot be lied to", zh="骗不倒的索引"),
    section=Section("06", "break-intro", dict(en="4 · Break it on purpose", zh="4 · 故意弄坏它")),
    hints=(
        dict(
            en="One dict from key to note. A note holds: its own number, the number of the note before it, the block's "
            "tokens, the block. Numbers come from `itertools.count(1)`; 0 is the empty prefix.",
            zh="一个字典,键到记录。一条记录里有:自己的编号、上一条的编号、这一块的 token、块号。编号用 "
            "`itertools.count(1)`,空前缀是 0。",
        ),
        dict(
            en="`insert` and `match` walk the same way: key = hash_function(key, tokens), look the note up, believe "
            "it only "
            "if tokens and parent number agree. `match` stops at the first that does not; `insert` replaces it by a "
            "new one.",
            zh="`insert` 和 `match` 走法一样:key = hash_function(key, tokens),查记录,token 和父编号都对才信。"
            "`match` 遇到不对的就停;`insert` 遇到不对的就换一条新的。",
        ),
        dict(
            en="`evict(block)`: drop the note that names this block, and only that. Its children need nothing: their "
            "parent's "
            "number never comes back, so `match` cannot reach them, and `insert` replaces them.",
            zh="`evict(block)`:删掉提到这个块的那条记录就行。子块不用管:父编号再也不会出现,`match` 走不到它们"
            ",`insert` 会换掉它们。",
        ),
    ),
    run=index.run_index,
    boundaries=index.BOUNDARIES,
    random_case=index.random_case,
    smaller=index.smaller,
    show=index.show,
    forbidden=(BlockManager.lookup, BlockManager.commit, index.Truth.insert, index.Truth.at_least),
    num_random=120,
)

ORDER = Exercise(
    id="ex06b",
    name="best_order",
    title=dict(en="The order that hits most", zh="命中最多的顺序"),
    section=Section("06", "cliff-intro", dict(en="9 · Where it does not help", zh="9 · 它帮不上忙的地方")),
    hints=(
        dict(
            en="Draw the prompts as a tree: a node a block, prompts that begin alike share a path. The pool holds "
            "one path. "
            "In which order do you visit the leaves, so that no node is entered twice?",
            zh="把 prompt 画成一棵树:一块一个节点,开头相同的共用一段路径。池子只装得下一条路径。按什么顺序走叶子,才"
            "不会把同一个节点进两遍?",
        ),
        dict(
            en="Depth first. You need not build the tree: which order of *lists* puts common beginnings side by "
            "side, and the "
            "shorter before the longer that continues it?",
            zh="深度优先。树不用真的建:**列表**按什么顺序排,才能让相同的开头挨在一起,而且短的排在接着它写的长的前面?",
        ),
        dict(
            en="The order of a dictionary. Python compares lists that way: `sorted(range(len(prompts)), "
            "key=prompts.__getitem__)`.",
            zh="字典序。Python 比较列表就是这么比的:`sorted(range(len(prompts)), key=prompts.__getitem__)`。",
        ),
    ),
    run=order.run_order,
    boundaries=order.BOUNDARIES,
    random_case=order.random_case,
    smaller=order.smaller,
    show=order.show,
    forbidden=(order.most_hits, order.measured_hits),
)

EXERCISES = (INDEX, ORDER)
