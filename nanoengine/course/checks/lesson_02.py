"""The two exercises of lesson 02."""

from __future__ import annotations

from nanoengine.course.checks import lesson_02_pack as pack
from nanoengine.course.checks import lesson_02_rope as rope
from nanoengine.course.checks.exercise import Exercise, Section

ROPE = Exercise(
    id="ex02a",
    name="move_keys",
    title=dict(en="RoPE at an offset", zh="RoPE:换个位置"),
    section=Section("02", "rope-intro", dict(en="RoPE: the position is an angle", zh="RoPE:位置就是角度")),
    hints=(
        dict(
            en="Turning by one angle and then by another is turning by their sum. The key stands at `old[i]` already; "
            "which angle brings it to `new[i]`?",
            zh="先转一个角度,再转一个角度,等于转它们的和。key 已经在 `old[i]` 了,再转多少就到 `new[i]`?",
        ),
        dict(
            en="Pair j of row i turns by (new[i] − old[i]) × theta ** (-2j / d); a negative angle turns back. "
            "(a, b) becomes (a·cos − b·sin, b·cos + a·sin).",
            zh="第 i 行第 j 对转 (new[i] − old[i]) × theta ** (-2j / d);角度是负的就往回转。"
            "(a, b) 变成 (a·cos − b·sin, b·cos + a·sin)。",
        ),
        dict(
            en="`angles = (new - old)[:, None] * theta ** (-np.arange(half) / half)`, then cos and sin of "
            "`angles[:, None]`, so that all heads share them. a is `keys[..., 0::2]`, b is `keys[..., 1::2]`; "
            "write both into `out = np.empty_like(keys)`.",
            zh="`angles = (new - old)[:, None] * theta ** (-np.arange(half) / half)`,再对 `angles[:, None]` 取 "
            "cos、sin,各个头共用。a 是 `keys[..., 0::2]`,b 是 `keys[..., 1::2]`;写回 `out = np.empty_like(keys)`。",
        ),
    ),
    run=rope.run_move,
    boundaries=rope.BOUNDARIES,
    random_case=rope.random_case,
    smaller=rope.smaller,
    show=rope.show,
    explain=rope.explain,
    forbidden=(rope.turned,),
)

PACK = Exercise(
    id="ex02b",
    name="pack_qkv",
    title=dict(en="q, k, v in one matrix", zh="q、k、v 装进一个矩阵"),
    section=Section("02", "packed-intro", dict(en="5 · The packed loader", zh="5 · 打包加载")),
    hints=(
        dict(
            en="The rows of the packed matrix: heads × head_dim of q, then kv_heads × head_dim of k, then as "
            "many of v. Where "
            "a part begins does not depend on the order in which tensors come.",
            zh="大矩阵的行:先是 q 的 heads × head_dim 行,再是 k 的 kv_heads × head_dim 行,然后 v 一样多。"
            "每一部分从哪行开始,和"
            "张量到来的顺序无关。",
        ),
        dict(
            en="Collect first: walk through `tensors` once, keep those whose name begins with "
            "`model.layers.{layer}.self_attn.` "
            "and has q_proj, k_proj or v_proj in it. Mind the dot: layer 1 is not layer 11.",
            zh="先收集:把 `tensors` 走一遍,名字以 `model.layers.{layer}.self_attn.` 开头、含 q_proj、k_proj 或 "
            "v_proj 的留下。注意那个"
            "点:第 1 层不是第 11 层。",
        ),
        dict(
            en="`np.concatenate([found[part + '_proj.weight'] for part in 'qkv'])`; before it, ValueError for "
            "each that is not "
            "there or has another number of rows. The bias the same way; all three or none.",
            zh="`np.concatenate([found[part + '_proj.weight'] for part in 'qkv'])`;在这之前,缺哪个、"
            "行数不对的是哪个,就抛 "
            "ValueError。偏置一样处理:要么三个都有,要么都没有。",
        ),
    ),
    run=pack.run_pack,
    boundaries=pack.BOUNDARIES,
    random_case=pack.random_case,
    smaller=pack.smaller,
    show=pack.show,
    explain=pack.explain,
    forbidden=(pack.product_by_parts,),
)

EXERCISES = (ROPE, PACK)
