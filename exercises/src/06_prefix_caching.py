# %% [markdown] id="title"
# # Exercises 06 · Prefix caching
#
# Two exercises, about 45 minutes. Run the next cell first; then write in the cells marked **yours** and run
# the check below each. Stuck?
# `hint("ex06a")` gives one hint after another; the same hints are folded under each task.
#
# Lesson: [06 · Prefix caching](../lessons/06_prefix_caching.ipynb)
#
# <!-- zh -->
# # 练习 06 · 前缀缓存:哈希链
#
# 两道题,约 45 分钟。先运行下一格,再在标着 `# yours` 的格子里写,写完运行下面的检查。卡住了就运行 `hint("ex06a")`,一次给一条提示;同样的提示也折叠在每道题下面。
#
# 课程:[06 · 前缀缓存:哈希链](../../lessons/zh/06_prefix_caching.ipynb)

# %% id="env" tags=["varies"]
from nanoengine.notebook import check, hint, lesson

lesson("06", lang="en", torch=False)

# %% [markdown] id="ex06a"
# ## 06a · An index that cannot be lied to
#
# No engine, no pool, no sequences: only the index, as a class that anyone could put beside a pool. It is given its hash function
# from outside, and the check gives it **bad ones**: with two blocks that collide, and one that always says 1. Misses are then
# allowed. A wrong block never is.
#
# <!-- zh -->
# ## 06a · 骗不倒的索引
#
# 没有引擎,没有池子,没有序列:只写索引,一个谁都能插到池子旁边的类。哈希函数是外面给的,检查时会给**坏的**:一个会让两个块碰撞,一个永远返回 1。这时可以漏,但绝不能给错块。

# %% [markdown] id="ex06a-rules"
# `PrefixIndex(block_size, hash_function)`, where `hash_function(parent_key, tokens)` returns an int; the first parent's key is 0.
#
# * `insert(token_ids, blocks)`: the full blocks of these tokens are now stored in `blocks` (an id each; a part-filled last block
#   has none);
# * `match(token_ids)` → the blocks of the longest known prefix, as a list. At least one token stays to be computed;
# * `evict(block)`: this block gets another owner. The pool calls this before any insert into it.
#
# Two blocks may hold the same content: keep either, and all that hangs on it.
#
# <!-- zh -->
# `PrefixIndex(block_size, hash_function)`,其中 `hash_function(parent_key, tokens)` 返回整数;第一块的父键是 0。
#
# * `insert(token_ids, blocks)`:这些 token 的满块现在存在 `blocks` 里(一块一个编号;最后没写满的没有);
# * `match(token_ids)` → 最长已知前缀的块,列表。至少留一个 token 去算;
# * `evict(block)`:这个块要换主人了。池子在重新写它之前一定会先调这个。
#
# 两个块可能存着同样的内容:留哪个都行,只是别把挂在它后面的弄丢。

# %% [markdown] id="ex06a-hints"
# <!-- hints ex06a -->
#
# <!-- zh -->
# <!-- hints ex06a -->

# %% id="ex06a-answer" tags=["answer"]
# --- stub
class PrefixIndex:  # yours
    def __init__(self, block_size, hash_function):  # then insert, match and evict
        raise NotImplementedError("ex06a")
# --- solution
class PrefixIndex:
    def __init__(self, block_size, hash_function):
        self.size, self.hash_function = block_size, hash_function
        self.notes = {}  # key -> (number, parent's number, tokens, block)
        self.last_number = 0

    def _walk(self, token_ids):
        key = 0
        for start in range(0, len(token_ids) - self.size + 1, self.size):
            tokens = tuple(token_ids[start : start + self.size])
            key = self.hash_function(key, tokens)
            yield key, tokens

    def insert(self, token_ids, blocks):
        parent = 0
        for block, (key, tokens) in zip(blocks, self._walk(token_ids), strict=True):
            note = self.notes.get(key)
            if not note or note[1:3] != (parent, tokens):
                self.last_number += 1
                note = self.notes[key] = (self.last_number, parent, tokens, block)
            parent = note[0]

    def match(self, token_ids):
        parent, found = 0, []
        for key, tokens in self._walk(token_ids[:-1]):
            note = self.notes.get(key)
            if note is None or note[1:3] != (parent, tokens):
                break
            parent = note[0]
            found.append(note[3])
        return found

    def evict(self, block):
        self.notes = {key: note for key, note in self.notes.items() if note[3] != block}

# %% id="ex06a-check" tags=["check"]
check("ex06a", globals())

# %% [markdown] id="ex06b"
# ## 06b · The order that hits most
#
# A batch job: all prompts are known, nobody is waiting for one in particular. They run one at a time, in a pool that just holds the
# longest. In which order do most tokens come from the cache?
#
# <!-- zh -->
# ## 06b · 命中最多的顺序
#
# 离线批处理:prompt 全都知道,没人催。一次跑一条,池子刚好装得下最长的那条。按什么顺序跑,来自缓存的 token 最多?

# %% [markdown] id="ex06b-rules"
# Write `best_order(prompts, block_size)` → the numbers of the prompts in the order to run them, each once.
#
# * `prompts` is a list of lists of token ids; leave it as it is;
# * the check runs your order on the real engine (one new token each) and compares its hits with the best that *any* order gets in a
#   pool that never evicts: that much can be had in the small pool, too.
#
# <!-- zh -->
# 写 `best_order(prompts, block_size)` → 按要跑的顺序给出 prompt 的编号,每个恰好一次。
#
# * `prompts` 是 token id 列表的列表,不要改它;
# * 检查会拿你的顺序在真引擎上跑(每条只生成一个 token),再和「池子永不驱逐时,**任何**顺序能拿到的最多命中」比:小池子里也拿得到这么多。

# %% [markdown] id="ex06b-hints"
# <!-- hints ex06b -->
#
# <!-- zh -->
# <!-- hints ex06b -->

# %% id="ex06b-answer" tags=["answer"]
# --- stub
def best_order(prompts, block_size):  # yours
    raise NotImplementedError("ex06b")
# --- solution
def best_order(prompts, block_size):
    # Lexicographic order is depth first through the prefix tree, parents before children.
    return sorted(range(len(prompts)), key=lambda i: prompts[i])

# %% id="ex06b-check" tags=["check"]
check("ex06b", globals())

# %% [markdown] id="next"
# Both green? In a terminal, `nanoengine course status` says what is next.
#
# <!-- zh -->
# 都绿了?在终端里运行 `nanoengine course status`,它会告诉你下一步。
