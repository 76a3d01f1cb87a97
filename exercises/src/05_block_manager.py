# %% [markdown] id="title"
# # Exercises 05 · The block manager
#
# Two exercises, about 35 minutes. Run the next cell first; then write in the cells marked **yours** and run
# the check below each. Stuck?
# `hint("ex05a")` gives one hint after another; the same hints are folded under each task.
#
# Lesson: [05 · The block manager](../lessons/05_block_manager.ipynb)
#
# <!-- zh -->
# # 练习 05 · 块管理器:引用计数与显存预算
#
# 两道题,约 35 分钟。先运行下一格,再在标着 `# yours` 的格子里写,写完运行下面的检查。卡住了就运行 `hint("ex05a")`,一次给一条提示;同样的提示也折叠在每道题下面。
#
# 课程:[05 · 块管理器:引用计数与显存预算](../../lessons/zh/05_block_manager.ipynb)

# %% id="env" tags=["varies"]
from nanoengine.notebook import check, hint, lesson

lesson("05", lang="en")

# %% [markdown] id="ex05a"
# ## 05a · The new-block boundary
#
# The lesson's `grow` is all or nothing. A scheduler that checks several guessed tokens in one step (*drafts*, lesson 14)
# would rather take **what there is**: if not all wanted tokens get a slot, then as many as do.
#
# Write `grow_by(computed, wanted, owned, free, block_size)` → `(blocks, tokens)`: how many blocks to take, and for how many of
# the wanted tokens there is a slot then.
#
# <!-- zh -->
# ## 05a · 新块的边界
#
# 课里的 `grow` 要么全给、要么不给。如果一步要验证好几个猜出来的 token(**草稿**,第 14 课),调度器更愿意**有多少拿多少**:槽不够分,就够几个算几个。
#
# 写 `grow_by(computed, wanted, owned, free, block_size)` → `(blocks, tokens)`:要拿几块;拿了之后,想要的 token 里有几个有槽。

# %% [markdown] id="ex05a-rules"
# * The sequence owns `owned` blocks; `computed` tokens are written, from the first slot on. `free` blocks are left in the
#   pool.
# * As many tokens as possible, at most `wanted`; for them as few blocks as possible.
# * Any block size from 1 on. A sequence may own more blocks than it has filled: it keeps them.
# * Examples, block size 4: `(8, 1, 2, 5)` → `(1, 1)`; `(6, 9, 2, 1)` → `(1, 6)`.
#
# <!-- zh -->
# * 这条序列手里有 `owned` 块,从第一个槽起写了 `computed` 个 token;池子里还有 `free` 块空着。
# * token 尽量多,最多 `wanted` 个;为此拿的块尽量少。
# * 块大小从 1 起都要对。手里的块可能比写满的多:留着就好。
# * 例(块大小 4):`(8, 1, 2, 5)` → `(1, 1)`;`(6, 9, 2, 1)` → `(1, 6)`。

# %% [markdown] id="ex05a-hints"
# <!-- hints ex05a -->
#
# <!-- zh -->
# <!-- hints ex05a -->

# %% id="ex05a-answer" tags=["answer"]
# --- stub
def grow_by(computed, wanted, owned, free, block_size):  # yours
    raise NotImplementedError("ex05a")
# --- solution
def grow_by(computed, wanted, owned, free, block_size):
    tokens = min(wanted, (owned + free) * block_size - computed)
    blocks = -(-(computed + tokens) // block_size)
    return max(0, blocks - owned), tokens

# %% id="ex05a-check" tags=["check"]
check("ex05a", globals())

# %% [markdown] id="ex05b"
# ## 05b · A double free, repaired
#
# This pool ran in a small server for weeks. Then two users read parts of each other's text. Read it before you run the
# trace; do you see it?
#
# <!-- zh -->
# ## 05b · 修好重复释放
#
# 这个池子在一个小服务里跑了好几周,直到有一天,两个用户读到了对方的文字。先读代码再跑记录,你看得出来吗?

# %% id="faulty"
from nanoengine.course.checks.lesson_05_pool import FaultyPool
from nanoengine.notebook import show

show(FaultyPool)

# %% [markdown] id="trace"
# The trace. A's client leaves in the very step in which A ends: both paths release it.
#
# <!-- zh -->
# 出错的记录。A 在某一步生成完毕,客户端恰好同一步断开:两条路都去释放它。

# %% id="trace-run"
pool = FaultyPool(6)
TRACE = [("allocate", "A", 3), ("release", "A"), ("release", "A"),
         ("allocate", "B", 4), ("allocate", "C", 3)]
for method, *arguments in TRACE:
    result = getattr(pool, method)(*arguments)
    print(f"{method:8} {arguments!s:10} -> {result!s:14} free {list(pool.free)}")
print("B and C both have:", sorted(set(pool.tables["B"]) & set(pool.tables["C"])))

# %% [markdown] id="ex05b-rules"
# Write `Pool`, with the same methods and attributes, repaired:
#
# * `release(name)` returns how many blocks **became free**. For a request without blocks (any more, or yet): 0, and nothing
#   changes.
# * `allocate` raises `ValueError` if the blocks are not there, and then nothing has changed.
# * A block belongs to all whose tables name it; it is free when the last of them has let go.
#
# The trace shows one fault. The check tries other lives.
#
# <!-- zh -->
# 写一个修好的 `Pool`,方法和属性不变:
#
# * `release(name)` 返回**变成空闲**的块数。已经没有块(或者还没有块)的请求:返回 0,什么都不变。
# * 块不够时 `allocate` 抛 `ValueError`,而且什么都没动过。
# * 一块属于所有块表里写着它的请求;最后一个放手,它才空闲。
#
# 记录里只看得到一个毛病,检查还会试别的。

# %% [markdown] id="ex05b-hints"
# <!-- hints ex05b -->
#
# <!-- zh -->
# <!-- hints ex05b -->

# %% id="ex05b-answer" tags=["answer"]
from collections import deque

# --- stub
class Pool:  # yours: begin with a copy of FaultyPool
    def __init__(self, num_blocks):
        raise NotImplementedError("ex05b")
# --- solution
class Pool:
    def __init__(self, num_blocks):
        self.free = deque(range(num_blocks))
        self.refs = [0] * num_blocks
        self.tables = {}

    @property
    def num_free(self):
        return len(self.free)

    def allocate(self, name, count):
        if count > len(self.free):
            raise ValueError(f"{name} needs {count} blocks, {len(self.free)} are free")
        return self.hold(name, [self.free.popleft() for _ in range(count)])

    def share(self, name, other, count):
        return self.hold(name, self.tables[other][:count])

    def hold(self, name, table):
        for block in table:
            self.refs[block] += 1
        self.tables[name] = table
        return table

    def release(self, name):
        freed = 0
        for block in reversed(self.tables.pop(name, [])):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.append(block)
                freed += 1
        return freed

# %% id="ex05b-check" tags=["check"]
check("ex05b", globals())

# %% [markdown] id="next"
# Both green? In a terminal, `nanoengine course status` says what is next.
#
# <!-- zh -->
# 都绿了?在终端里运行 `nanoengine course status`,它会告诉你下一步。
