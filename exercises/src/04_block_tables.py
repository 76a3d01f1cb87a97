# %% [markdown] id="title"
# # Exercises 04 · Block tables
#
# Two exercises, about 35 minutes. Run the next cell first; then write in the cells marked **yours** and run
# the check below each. Stuck?
# `hint("ex04a")` gives one hint after another; the same hints are folded under each task.
#
# Lesson: [04 · Block tables](../lessons/04_block_tables.ipynb)
#
# <!-- zh -->
# # 练习 04 · 分页 KV:块表与槽映射
#
# 两道题,约 35 分钟。先运行下一格,再在标着 `# yours` 的格子里写,写完运行下面的检查。卡住了就运行 `hint("ex04a")`,一次给一条提示;同样的提示也折叠在每道题下面。
#
# 课程:[04 · 分页 KV:块表与槽映射](../../lessons/zh/04_block_tables.ipynb)

# %% id="env" tags=["varies"]
from nanoengine.notebook import check, hint, lesson

lesson("04", lang="en")

# %% [markdown] id="ex04a"
# ## 04a · The slots of a prefill span
#
# KV is moved between machines (lesson 17) with one copy a *contiguous* piece of memory, and each copy has a fixed cost.
# So: few pieces.
#
# Write `slot_runs(block_table, start, end, block_size)`: the slots of the tokens at positions `start` … `end - 1`, as a
# list of runs `(first slot, number of slots)`, in the order of the tokens, **as few as possible**.
#
# <!-- zh -->
# ## 04a · 一段 prefill 的槽
#
# KV 在机器之间搬(第 17 课)的时候,**连续的**一段显存拷一次,每次拷贝都有固定开销。所以段要少。
#
# 写 `slot_runs(block_table, start, end, block_size)`:位置 `start` … `end - 1` 的 token 都在哪些槽,返回一个列表,元素是 `(第一个槽, 槽数)`,按 token 的顺序,**段数尽量少**。

# %% [markdown] id="ex04a-rules"
# * The span may start and end in the middle of a block.
# * Two blocks that follow each other in the table *and* in memory make one run.
# * `start == end`: an empty list. `end` beyond what the table has room for: `ValueError`.
# * Example: `slot_runs([7, 2, 3], 2, 10, 4)` is `[(30, 2), (8, 6)]`.
#
# <!-- zh -->
# * 一段可能从块中间开始,也可能在块中间结束。
# * 两块在块表里前后相邻,**并且**在显存里也前后相邻,才并成一段。
# * `start == end`:空列表。`end` 超过块表放得下的:抛 `ValueError`。
# * 例:`slot_runs([7, 2, 3], 2, 10, 4)` 是 `[(30, 2), (8, 6)]`。

# %% [markdown] id="ex04a-hints"
# <!-- hints ex04a -->
#
# <!-- zh -->
# <!-- hints ex04a -->

# %% id="ex04a-answer" tags=["answer"]
# --- stub
def slot_runs(block_table, start, end, block_size):  # yours
    raise NotImplementedError("ex04a")
# --- solution
def slot_runs(block_table, start, end, block_size):
    if end > len(block_table) * block_size:
        raise ValueError(f"end is {end}, {len(block_table)} blocks hold {len(block_table) * block_size} tokens")
    runs, position = [], start
    while position < end:
        offset = position % block_size
        slot = block_table[position // block_size] * block_size + offset
        length = min(block_size - offset, end - position)
        if runs and slot == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + length)
        else:
            runs.append((slot, length))
        position += length
    return runs

# %% id="ex04a-check" tags=["check"]
check("ex04a", globals())

# %% [markdown] id="ex04b"
# ## 04b · Static against paged
#
# Requests wait in line, each `(prompt, generated, max_tokens)`: prompt tokens, tokens generated so far (at least 1), and the
# most it may generate. Let them in, in order, until one does not fit.
#
# Write `seats(requests, pool_slots, block_size)`:
#
# `{"static": (admitted, empty), "paged": (admitted, empty)}`: how many are in, and how many slots they own **that hold
# no token now**.
#
# <!-- zh -->
# ## 04b · 静态预留对比分块
#
# 一队请求,每个是 `(prompt, generated, max_tokens)`:prompt 的 token 数、已经生成的个数(至少 1)、最多能生成几个。按顺序放进来,直到有一个放不下。
#
# 写 `seats(requests, pool_slots, block_size)`:
#
# `{"static": (进来几个, 空槽), "paged": (进来几个, 空槽)}`:空槽是进来的请求占着、**现在却没放 token** 的槽。

# %% [markdown] id="ex04b-rules"
# * KV exists for all tokens but the newest, which was only sampled.
# * static: each owns, from the start, the slots that its longest answer could ever need. Strips lie end to end.
# * paged: each owns the blocks that its KV needs *now*. The pool is cut into whole blocks; a rest stays unused.
# * Nobody overtakes: the first that does not fit closes the door.
# * Example: `seats([(10, 3, 12), (6, 3, 12), (14, 1, 6)], 48, 4)` is `{"static": (2, 18), "paged": (3, 2)}`.
#
# <!-- zh -->
# * 除了最新的 token(只是采出来了),其余 token 都有 KV。
# * 静态:从一开始就占着最长的答案可能用到的槽。一条接一条,首尾相接。
# * 分块:只占**现在**的 KV 要用的块。池子切成整块,零头不用。
# * 不许插队:第一个放不下的,就把门关上。
# * 例:`seats([(10, 3, 12), (6, 3, 12), (14, 1, 6)], 48, 4)` 是 `{"static": (2, 18), "paged": (3, 2)}`。

# %% [markdown] id="ex04b-hints"
# <!-- hints ex04b -->
#
# <!-- zh -->
# <!-- hints ex04b -->

# %% id="ex04b-answer" tags=["answer"]
# --- stub
def seats(requests, pool_slots, block_size):  # yours
    raise NotImplementedError("ex04b")
# --- solution
def seats(requests, pool_slots, block_size):
    return {"static": let_in(requests, pool_slots, block_size, static=True),
            "paged": let_in(requests, pool_slots // block_size * block_size, block_size, static=False)}


def let_in(requests, free, block_size, static):
    admitted = empty = 0
    for prompt, generated, max_tokens in requests:
        written = prompt + generated - 1
        owned = prompt + max_tokens - 1 if static else -(-written // block_size) * block_size
        if owned > free:
            break
        free -= owned
        admitted += 1
        empty += owned - written
    return admitted, empty

# %% id="ex04b-check" tags=["check"]
check("ex04b", globals())

# %% [markdown] id="next"
# Both green? In a terminal, `nanoengine course status` says what is next.
#
# <!-- zh -->
# 都绿了?在终端里运行 `nanoengine course status`,它会告诉你下一步。
