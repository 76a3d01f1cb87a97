# %% [markdown] id="title"
# # Exercises 02 · One forward pass
#
# Two exercises, about 35 minutes, numpy only. Run the next cell first; then write in the cells marked **yours** and run
# the check below each. Stuck?
# `hint("ex02a")` gives one hint after another; the same hints are folded under each task.
#
# Lesson: [02 · One forward pass](../lessons/02_forward_pass.ipynb)
#
# <!-- zh -->
# # 练习 02 · 一次前向:从权重到 logits
#
# 两道题,约 35 分钟,只用 numpy。先运行下一格,再在标着 `# yours` 的格子里写,写完运行下面的检查。卡住了就运行 `hint("ex02a")`,一次给一条提示;同样的提示也折叠在每道题下面。
#
# 课程:[02 · 一次前向:从权重到 logits](../../lessons/zh/02_forward_pass.ipynb)

# %% id="env" tags=["varies"]
from nanoengine.notebook import check, hint, lesson

lesson("02", lang="en")

# %% [markdown] id="ex02a"
# ## 02a · RoPE at an offset
#
# A chat has filled its context. llama.cpp can then drop a stretch from the middle ("context shift"): what stood behind it
# moves up. Its keys are in the cache, *turned already*, and nobody kept the unturned ones.
#
# Write `move_keys(keys, old, new, theta)`: `keys` is a float array `[tokens, heads, d]`, row i turned at position
# `old[i]`. Return the keys as if turned at `new[i]`; leave all inputs as they are.
#
# <!-- zh -->
# ## 02a · RoPE:换个位置
#
# 聊天把上下文占满了。llama.cpp 可以从中间删掉一段(叫 context shift),后面的往前挪。它们的 key 在缓存里,**已经转过了**,没转过的谁也没留。
#
# 写 `move_keys(keys, old, new, theta)`:`keys` 是浮点数组 `[token, 头, d]`,第 i 行是按位置 `old[i]` 转的。返回按 `new[i]` 转的样子;输入一律不要改。

# %% [markdown] id="ex02a-rules"
# * `old` and `new` are integer arrays `[tokens]`: any positions in any order; a key may move back, move ahead or stay.
# * The layout is llama.cpp's for Llama, not the lesson's: **neighbours** (2j, 2j + 1) are a pair; its angle is
#   position × theta ** (−2j / d).
# * All heads of a row turn alike. No rows in, no rows out.
#
# Only the place is mended: in deeper layers a key also holds what its token once read from the stretch that was dropped.
#
# <!-- zh -->
# * `old`、`new` 是整数数组 `[token]`:位置任意,顺序任意;key 可以往前挪、往后挪,也可以不动。
# * 排法是 llama.cpp 给 Llama 用的,和课上不同:**相邻**的 (2j, 2j + 1) 是一对,角度 = 位置 × theta ** (−2j / d)。
# * 同一行的各个头转得一样。一行都没有时,返回同样形状的空数组。
#
# 补好的只是位置:更深的层里,key 还带着当初从被删的那段读来的东西。

# %% [markdown] id="ex02a-hints"
# <!-- hints ex02a -->
#
# <!-- zh -->
# <!-- hints ex02a -->

# %% id="ex02a-answer" tags=["answer"]
import numpy as np

# --- stub
def move_keys(keys, old, new, theta):  # yours
    raise NotImplementedError("ex02a")
# --- solution
def move_keys(keys, old, new, theta):
    half = keys.shape[-1] // 2
    angles = (new - old)[:, None] * theta ** (-np.arange(half) / half)  # rotations add: turn by what is missing
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = keys[..., 0::2], keys[..., 1::2]
    out = np.empty_like(keys)
    out[..., 0::2], out[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    return out

# %% id="ex02a-check" tags=["check"]
check("ex02a", globals())

# %% [markdown] id="ex02b"
# ## 02b · q, k, v in one matrix
#
# A checkpoint yields `(name, array)` pairs of all layers, each once, in any order (an iterator: one pass only). Write
# `pack_qkv(tensors, layer, heads, kv_heads, head_dim)` and return `(weight, bias)` of this layer: the rows of q, then k, then v.
#
# Names look like `model.layers.3.self_attn.k_proj.weight` (and `.bias`).
#
# <!-- zh -->
# ## 02b · q、k、v 装进一个矩阵
#
# checkpoint 给出一串 `(名字, 数组)`,各层都有,顺序随意,每个只来一次(是迭代器,只能走一遍)。写 `pack_qkv(tensors, layer, heads, kv_heads, head_dim)`,返回这一层的 `(weight, bias)`:先 q 的行,再 k,再 v。
#
# 名字形如 `model.layers.3.self_attn.k_proj.weight`(还有 `.bias`)。

# %% [markdown] id="ex02b-rules"
# * `bias` is `None` where the layer has no biases at all.
# * A tensor that is missing (also one bias of three), or does not have heads × head_dim rows (k and v:
#   kv_heads × head_dim): `ValueError` with its name in the message, as `k_proj.weight`.
#
# <!-- zh -->
# * 这一层完全没有偏置时,`bias` 是 `None`。
# * 缺一个张量(三个偏置缺一个也算),或者行数不是 heads × head_dim(k、v 是 kv_heads × head_dim):抛 `ValueError`,消息里写上它的名字,例如 `k_proj.weight`。

# %% [markdown] id="ex02b-hints"
# <!-- hints ex02b -->
#
# <!-- zh -->
# <!-- hints ex02b -->

# %% id="ex02b-answer" tags=["answer"]
import numpy as np

# --- stub
def pack_qkv(tensors, layer, heads, kv_heads, head_dim):  # yours
    raise NotImplementedError("ex02b")
# --- solution
def pack_qkv(tensors, layer, heads, kv_heads, head_dim):
    prefix = f"model.layers.{layer}.self_attn."
    found = {name.removeprefix(prefix): value for name, value in tensors if name.startswith(prefix)}
    rows = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}

    def stack(kind):
        for part, size in rows.items():
            value = found.get(f"{part}.{kind}")
            if value is None or len(value) != size:
                came = "missing" if value is None else f"{len(value)} rows"
                raise ValueError(f"{prefix}{part}.{kind}: {came}, expected {size} rows")
        return np.concatenate([found[f"{part}.{kind}"] for part in rows])

    has_bias = any(f"{part}.bias" in found for part in rows)
    return stack("weight"), stack("bias") if has_bias else None

# %% id="ex02b-check" tags=["check"]
check("ex02b", globals())

# %% [markdown] id="next"
# Both green? In a terminal, `nanoengine course status` says what is next.
#
# <!-- zh -->
# 都绿了?在终端里运行 `nanoengine course status`,它会告诉你下一步。
