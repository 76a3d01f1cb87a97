# %% [markdown] id="title"
# # Lesson 05 · The block manager
#
# *Who hands out blocks, who takes them back, and how many there are.*
#
# **About 55 minutes** · before this: 04 · no GPU, no torch · source walked: `nanoengine/engine/block_manager.py`
#
# After this lesson you can
#
# 1. name the three structures of a block manager and the laws between them;
# 2. say when a sequence needs a new block, and why by a ceiling, not a remainder;
# 3. answer "how many sequences fit on this GPU?" for any card and model.
#
# <!-- zh -->
# # 课程 05 · 块管理器:引用计数与显存预算
#
# *谁来发块,谁来收块,一共有多少块。*
#
# **约 55 分钟** · 前置:04 · 不用 GPU,不用 torch · 源码:`nanoengine/engine/block_manager.py`
#
# 这一课结束时你会拿到
#
# 1. 能说出块管理器的三个数据结构,以及任何时刻都成立的几条规矩;
# 2. 能讲清什么时候要新块,为什么用向上取整,而不是看余数;
# 3. 「这张卡能放几条序列」,随便什么卡、什么模型都能答。

# %% id="env" tags=["varies"]
from nanoengine.notebook import cards, hunt, lesson, player, quiz, recall, record, show

lesson("05", lang="en")

# %% [markdown] id="question"
# ## The question
#
# > "How many sequences fit on this GPU?"
#
# "Memory divided by the size of the longest sequence" answers another question: how many fit *if all are as long as they
# may ever get*. Which memory? Sequences of what length? And who makes sure that a block given to one is not still read by
# another?
#
# Somebody in the engine must know all of that at every step. Its file has about 240 lines, prefix cache included.
#
# <!-- zh -->
# ## 面试官的问题
#
# > 「这张 GPU 能放几条序列?」
#
# 「显存除以最长序列的大小」,答的是另一个问题:**如果每条都长到头**,能放几条。哪部分显存?多长的序列?还有,谁来保证发给这一条的块,没有别人还在读?
#
# 这些事,引擎里得有个角色,每一步都心里有数。它就一个文件,连前缀缓存在内大约 240 行。

# %% [markdown] id="naive-intro"
# ## 1 · First, a dumb version
#
# The obvious record: an array with the owner of each block. To take one, look for a free entry.
#
# **Predict:** a card with 70,000 blocks, nearly all in use. How long does one `take` need, and how does that grow with
# the pool?
#
# <!-- zh -->
# ## 1 · 先写一个「笨」的版本
#
# 最直觉的记法:一个数组,写着每块归谁。要块的时候,从头找一个空的。
#
# **先预测**:一张卡有 7 万块,几乎都在用。拿一块要多久?池子变大,它怎么涨?

# %% id="naive" tags=["varies"]
import time

class Owners:
    def __init__(self, num_blocks):
        self.owner = [None] * num_blocks

    def take(self, name):
        block = self.owner.index(None)  # look through the pool
        self.owner[block] = name
        return block

    def free(self, name):
        self.owner = [None if owner == name else owner for owner in self.owner]


def microseconds(action, *args):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        action(*args)
        times.append(time.perf_counter() - start)
    return min(times) * 1e6

for num_blocks in (12, 700, 70_000):
    pool = Owners(num_blocks)
    pool.owner[:-10] = ["somebody"] * (num_blocks - 10)
    take, free = microseconds(pool.take, "A"), microseconds(pool.free, "A")
    print(f"{num_blocks:6} blocks: take {take:7.1f} us, free {free:7.1f} us")

# %% [markdown] id="naive-read"
# Both grow with the pool, and the pool has nothing to do with this request. At 256 sequences and blocks of 16 tokens, a
# decode step takes 16 blocks on average. Multiply: `take` alone costs tens of times the half millisecond that this
# engine allows the host for a whole step.
#
# That is the small problem. The large one: **an array of owners has room for one name a block.** What that costs:
#
# <!-- zh -->
# 两个都随池子变大而变慢,可池子多大和这个请求毫无关系。256 条序列、每块 16 个 token,一步 decode 平均要拿 16 块。乘一下:这个引擎给主机一整步的预算是半毫秒,光 `take` 就超了几十倍。
#
# 这还是小毛病。大毛病是:**归属数组里,一块只写得下一个名字。** 代价有多大,算一下:

# %% id="naive-share"
def blocks(tokens, size):
    return -(-tokens // size)

apart, common = blocks(10, 4) + blocks(14, 4), 8 // 4      # prompts of A and C, their 8 tokens
print(f"A and C: {apart} blocks, sharing {common}: {apart - common}")
own, system = blocks(1200, 16), 1000 // 16                  # 100 prompts, one system prompt
print(f"100 requests: {100 * own:,} blocks,", end=" ")
print(f"sharing {system}: {system + 100 * (own - system):,}")

# %% [markdown] id="idea"
# ## 2 · Three structures
#
# | structure | answers | an entry |
# | --- | --- | --- |
# | **block table**, one a sequence | where are my tokens? | block id |
# | **reference counts**, one a block | how many tables name this block? | integer |
# | **free list**, one in all | which block is next? | block id |
#
# Taking or giving back a block is O(1). A block that two tables name has count 2 and goes back when the *second* lets go.
#
# <!-- zh -->
# ## 2 · 三个结构
#
# | 结构 | 回答什么 | 每项存 |
# | --- | --- | --- |
# | **块表**,每条序列一张 | 我的 token 在哪? | 块号 |
# | **引用计数**,每块一个 | 有几张块表写着它? | 整数 |
# | **空闲链表**,全池一个 | 下一个发谁? | 块号 |
#
# 拿一块、还一块都是 O(1)。两张块表都写着的块,计数是 2,等**第二个**放手才算空闲。

# %% [markdown] id="laws"
# Four laws, the pool's **invariants**, hold between any two calls:
#
# 1. free + in use = all blocks;
# 2. a block's count = the number of tables that name it;
# 3. count 0 ⇔ it stands in the free list, once;
# 4. a shared block is never written.
#
# Below, the package checks them at every step. **Predict:** A-D (prompts of 10, 6, 14, 20 tokens) share 12 blocks of 4. In
# step 1 C finds A's first 8 tokens in the cache, and D starts. Which blocks have count 2? Is any free?
#
# <!-- zh -->
# 四条规矩(**不变量**)把三者拴在一起。任意两次调用之间都成立:
#
# 1. 空闲 + 在用 = 全部;
# 2. 一块的计数 = 写着它的块表数;
# 3. 计数为 0 ⇔ 它在空闲链表里,而且只出现一次;
# 4. 共享的块,绝不写入。
#
# 下面每一步都会用包里的方法把四条查一遍。**先预测**:A-D 的 prompt 是 10、6、14、20 个 token,一共 12 块,每块 4 格。第 1 步,C 在缓存里找到 A 的前 8 个 token,D 也进来了。哪几块的计数是 2?还有空闲的吗?

# %% id="watch"
from nanoengine.course.example import REQUESTS, example_engine

engine = example_engine()
with record(engine) as trace:
    for _ in engine.run():
        engine.block_manager.check_invariants(engine.sequences.values())
for step in trace[:5]:
    print(f"step {step['step']}: counts {step['ref_counts']}, free {step['free']}")

# %% [markdown] id="watch-read"
# Blocks 0 and 1 have count 2: written by A, named by A and C. The pool is full to the last block.
#
# At step 3 A and B need a block each. D, the last in, gives back five: its *tail* (block 11) first. A gets 11, B gets
# 10, and the free list reads `{{ trace[3]['free'] }}`: D's head is the last to be handed out again. Why that order? It
# matters in lesson 06.
#
# <!-- zh -->
# 0 号和 1 号块计数是 2:A 写的,A 和 C 的块表都写着。池子一块不剩。
#
# 第 3 步 A 和 B 各要一块。最晚进来的 D 交出五块,**尾巴**(11 号)先还。A 拿走 11,B 拿走 10,空闲链表剩下 `{{ trace[3]['free'] }}`:D 的头最后才会再发出去。为什么是这个顺序?第 06 课见分晓。

# %% id="watch-3"
player(trace, panes=("why", "pool", "table"))

# %% [markdown] id="source-intro"
# ## 3 · Open the source
#
# Three calls, in the order of a sequence's life: `allocate` when it starts, `grow` while it decodes, `free` at its end.
# The lines about `content` belong to the prefix cache; skip them today.
#
# <!-- zh -->
# ## 3 · 打开源码
#
# 三个调用,正好是一条序列的一生:开始时 `allocate`,decode 时 `grow`,结束时 `free`。带 `content` 的几行是前缀缓存的,今天先跳过。

# %% id="show-allocate"
from nanoengine.engine.block_manager import BlockManager

show(BlockManager.allocate, lines=("for block in cached", "seq.num_computed_tokens ="),
     highlight="ref_counts[block]")

# %% [markdown] id="allocate-read"
# Shared blocks first: if nobody held one it leaves the free list, and its count goes up. Then fresh ones for *all* the
# rest of the prompt. (`capacity` is the number of its slots: the scheduler calls `grow` only when a step needs more.)
#
# All at once, though the prompt may be computed in chunks over many steps: a prefill that got stuck halfway would hold
# blocks and give nothing (lesson 08).
#
# <!-- zh -->
# 先是共享的块:没人占着的,先从空闲链表里摘出来,再把计数加一。剩下的 prompt **一次**拿齐新块。(`capacity` 是手里一共几个槽;这一步放不下了,调度器才来调 `grow`。)
#
# prompt 可能要分很多步算,块却一次拿齐:prefill 卡在半路最糟,占着块又出不了活(第 08 课)。

# %% id="show-grow"
show(BlockManager.grow, doc=False, highlight="missing")

# %% id="show-free"
show(BlockManager.free, doc=False, highlight=["reversed", "-= 1", "if not self.ref"])

# %% [markdown] id="free-read"
# `grow`: the line with `missing =` is the whole question "does it need a block?". All or nothing: on `False` nothing has
# changed; the scheduler preempts somebody and asks again.
#
# `free`: each block loses **one** reference, and joins the free list only at zero: at the back, or at the front if it
# holds nothing of use. The empty table makes a second `free` harmless. It is *replaced* (`= []`), not cleared: a step in
# flight may still read the old list.
#
# <!-- zh -->
# `grow`:`missing =` 那一行就是「要不要新块」的全部。要么全给,要么不给:返回 `False` 时什么都没动,调度器去抢占别人,再来问一次。
#
# `free`:每块只减**一个**引用,减到 0 才进空闲链表:一般排到队尾,里面没有可用内容的插到队首。最后块表变空,再来一次 `free` 也无害。块表是**换掉**(`= []`),不是清空:正在飞的那一步可能还拿着旧列表在读。

# %% [markdown] id="yours-intro"
# ## 4 · Your version
#
# A block manager without a prefix cache, on the engine's own protocol: seven methods. `LLMEngine` takes the class as it is.
# First the easy half; then `grow` and `free`, which keep the four laws. Write them yourself before you read mine.
#
# <!-- zh -->
# ## 4 · 你来写一遍
#
# 写一个不带前缀缓存的块管理器,接口就是引擎用的那套,七个方法。`LLMEngine` 直接收这个类。先写容易的一半;再写 `grow` 和 `free`,四条规矩全靠它们守。先自己写,再看下面的。

# %% id="my-pool"
from collections import deque

class MyPool:
    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.reset()

    def reset(self):
        self.refs, self.unused = [0] * self.num_blocks, deque(range(self.num_blocks))

    @property
    def num_free_blocks(self):
        return len(self.unused)

    def lookup(self, seq):
        return []  # shares nothing

    def can_allocate(self, seq, cached, reserve=0):  # reserve: blocks to leave to others
        needed = blocks(len(seq.token_ids), self.block_size) - len(cached)
        return needed + reserve <= len(self.unused)

    def allocate(self, seq, cached):
        for block in cached:
            self.refs[block] += 1
        seq.block_table = list(cached)
        seq.num_computed_tokens = len(cached) * self.block_size
        self.grow(seq, len(seq.token_ids) - seq.num_computed_tokens)

    def commit(self, seq, num_written):
        pass  # remembers nothing

# %% id="my-grow-free"
def grow(self, seq, num_tokens):
    total = seq.num_computed_tokens + num_tokens
    missing = blocks(total, self.block_size) - len(seq.block_table)
    if missing > len(self.unused):
        return False                        # and nothing has changed
    for _ in range(missing):
        block = self.unused.popleft()
        self.refs[block] = 1
        seq.block_table.append(block)
    seq.capacity = len(seq.block_table) * self.block_size
    return True

# %% id="my-free"
def free(self, seq):
    for block in reversed(seq.block_table):
        self.refs[block] -= 1
        if not self.refs[block]:            # nobody is left; no cache, so to the front
            self.unused.appendleft(block)
    seq.block_table, seq.capacity = [], 0   # a second free finds nothing

MyPool.grow, MyPool.free = grow, free

# %% id="my-pool-check"
from nanoengine import EngineConfig, SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sim import SlotRunner

def life(manager, **settings):
    """The outputs of A-D, and the block tables at every step."""
    config = EngineConfig(max_num_batched_tokens=16, max_num_seqs=4, **settings)
    engine = LLMEngine(config, runner=SlotRunner(12, 4), block_manager=manager)
    seqs = [engine.add_request(p, SamplingParams(max_tokens=n)) for p, n in REQUESTS.values()]
    tables = [[list(seq.block_table) for seq in seqs] for _ in engine.run()]
    return [seq.output_ids for seq in seqs], tables

mine, theirs = life(MyPool), life(None, enable_prefix_caching=False)  # None: the package's own
print("tokens equal:", mine[0] == theirs[0])
print("block tables equal in all", len(theirs[1]), "steps:", mine[1] == theirs[1])

# %% [markdown] id="share-intro"
# Token by token, and block by block. So far no block was ever shared, so the counts had nothing to do. Give them work:
# a `lookup` that finds full blocks of a *running* sequence with the same beginning.
#
# <!-- zh -->
# 逐 token 相等,逐块也相等。不过到现在没有一块被共享过,计数一直闲着。给它找点活:写一个 `lookup`,去找**正在跑的**、开头一样的序列,共享它的满块。

# %% id="sharing"
class Sharing(MyPool):
    def reset(self):
        super().reset()
        self.holders = {}

    def lookup(self, seq):
        best, size = [], self.block_size
        for other in self.holders.values():
            # full blocks that are written; at least one token is left to compute
            most = min(other.num_computed_tokens, len(seq.token_ids) - 1) // size
            # the first of them that differs
            same = next((i for i in range(most) if seq.token_ids[i * size : (i + 1) * size]
                         != other.token_ids[i * size : (i + 1) * size]), most)
            best = max(best, other.block_table[:same], key=len)
        return best

    def allocate(self, seq, cached):
        super().allocate(seq, cached)
        self.holders[seq.seq_id] = seq

    def free(self, seq):
        super().free(seq)
        self.holders.pop(seq.seq_id, None)

from nanoengine.sim import expected_output

right = [expected_output(prompt, new) for prompt, new in REQUESTS.values()]
shared = life(Sharing)
print("right:", shared[0] == right, "/ step 1, A and C:", shared[1][1][0], shared[1][1][2])

# %% [markdown] id="counts-predict"
# Now take the counts away: `free` gives every block back, whoever else names it.
#
# **Predict:** C ends first. Whose text goes wrong, and from when on?
#
# <!-- zh -->
# 现在把计数拿掉:`free` 不管还有谁在用,全部还回去。
#
# **先预测**:C 最先结束。谁的输出会错?从什么时候开始错?

# %% id="no-counts"
class NoCounts(Sharing):
    def free(self, seq):
        self.unused.extendleft(reversed(seq.block_table))
        seq.block_table, seq.capacity = [], 0
        self.holders.pop(seq.seq_id, None)

broken, tables = life(NoCounts)
for name, got, want in zip("ABCD", broken, right):
    same = next((i for i, (x, y) in enumerate(zip(got, want)) if x != y), len(want))
    print(f"{name}: {len(want)} tokens, right for {same}")
print("step 7, tables of A and B:", *tables[7][:2])

# %% [markdown] id="no-counts-read"
# A goes wrong although A did nothing. C gave back blocks 0 and 1 while A still read them; one went to B, and the other to
# **A itself**: its table is `{{ tables[7][0] }}`, and its newest token lands on its first. When A ends it gives both back
# *again*, a double free, and D pays for it.
#
# No exception, no warning; only text that slides into nonsense. So the four laws are checked by machine. In production you
# would see this as "the model got worse".
#
# <!-- zh -->
# A 什么都没做错,输出却错了。C 把 0 号和 1 号还了回去,A 还在读;一块到了 B 手里,另一块发给了 **A 自己**:它的块表成了 `{{ tables[7][0] }}`,最新的 token 写到了自己开头的位置上。A 结束时又把这两块**再**还一遍(重复释放),最后倒霉的是 D。
#
# 没有异常,没有警告,只有一段文字慢慢变成胡话。所以四条规矩要让机器来查。线上碰到,你看到的只会是「模型变差了」。

# %% [markdown] id="key-insight"
# > **Key insight.** A block manager does not manage memory: the memory was allocated once, at start-up. It manages
# > **promises**, "this block is yours until you say so". The count is the number of promises still out.
#
# <!-- zh -->
# > **关键洞察** 块管理器管的不是显存:显存启动时就一次分好了。它管的是**承诺**:「这块归你,你放手为止」。引用计数,就是还没收回的承诺有几个。

# %% [markdown] id="ceiling-intro"
# ## 5 · When is a new block needed?
#
# nano-vllm asks `len(seq) % block_size == 1`. The package asks whether
# ceil((computed + scheduled) / size) > len(table). **Predict:** for which block sizes do the two agree when one token is
# decoded? And when three are written at once, as when guessed tokens (*drafts*, lesson 14) are accepted?
#
# <!-- zh -->
# ## 5 · 什么时候要新块?
#
# nano-vllm 问的是 `len(seq) % block_size == 1`。包里问的是 ceil((已算 + 本步要算) / 块大小) > len(块表)。**先预测**:一次 decode 一个 token,块大小取几的时候两种问法一致?要是一次写三个 token(比如接受了几个猜中的**草稿** token,第 14 课)呢?

# %% id="ceiling"
def disagree(size, at_once, upto=60):
    """How often remainder and ceiling ask for different numbers of blocks, and where first."""
    wrong, owned = [], 1
    for computed in range(1, upto, at_once):
        known = computed + 1                             # the newest token has no KV yet
        needs = max(0, blocks(computed + at_once, size) - owned)
        if (known % size == 1) != needs:                 # True is 1 block, False is 0
            wrong.append(known)
        owned += needs
    return len(wrong), wrong[:1]

for size, at_once in ((256, 1), (4, 1), (2, 1), (1, 1), (4, 3), (4, 8)):
    count, first = disagree(size, at_once)
    print(f"size {size:3}, {at_once} at a time: {count:2} times, first at length", *first or "-")

# %% [markdown] id="ceiling-read"
# One at a time and size ≥ 2: no difference. With **size 1** the remainder is never 1, so the short form never asks for a
# block. With several tokens at once it looks at one position and misses the boundaries in between, or the second block.
#
# The short form is the ceiling with its assumptions built in. When the assumptions move (drafts, chunks), it stays quiet
# and wrong.
#
# <!-- zh -->
# 一次一个、块大小 ≥ 2:没区别。块大小是 **1** 时,余数永远不会是 1,简写一次也不触发。一次写几个 token,它只盯着一个位置,中间跨过的边界、要的第二块,都看不见。
#
# 简写就是把前提焊死了的向上取整。前提一变(草稿、chunk),它一声不吭地错。

# %% [markdown] id="deque-intro"
# ## 6 · Why not a plain deque for the free list?
#
# Yours is a deque, and it served: take at the left, give back at the left. The package uses an ordered dict. One more
# thing is asked there: a free block may still hold a known prefix, and somebody wants *that one*, from the middle.
#
# <!-- zh -->
# ## 6 · 空闲链表为什么不用普通 deque?
#
# 你写的就是 deque,够用:左边拿,左边还。包里用的是有序字典。因为那边还多一件事:一个空闲块里可能还留着某段前缀,有人点名要**那一块**,它在链表中间。

# %% id="deque" tags=["varies"]
from collections import OrderedDict

def remove_many(free_list, wanted):
    for block in wanted:
        free_list.remove(block)

def delete_many(free_list, wanted):
    for block in wanted:
        del free_list[block]

wanted = range(33_000, 33_064)  # a prefix of 64 blocks, in the middle of 67,000 free ones
for make, action in ((deque, remove_many), (OrderedDict.fromkeys, delete_many)):
    free_list = make(range(67_000))
    start = time.perf_counter()
    action(free_list, wanted)
    us = (time.perf_counter() - start) * 1e6
    print(f"{type(free_list).__name__:12} {us:8.0f} us to revive 64 blocks")

# %% [markdown] id="deque-read"
# `deque.remove` searches; each search is O(free blocks), and one prefix hit does it once a block. vLLM wrote a doubly
# linked list through the blocks themselves (`FreeKVCacheBlockQueue`), and its docstring gives this reason. In Python an
# ordered dict is the same thing, ready made.
#
# <!-- zh -->
# `deque.remove` 是在找:每次 O(空闲块数),命中一次前缀,每块都要找一遍。vLLM 用块自己当节点,写了个双向链表(`FreeKVCacheBlockQueue`),文档里写的就是这个理由。在 Python 里,有序字典就是现成的双向链表。

# %% [markdown] id="cow-intro"
# ## 7 · Copy-on-write: when a sequence forks
#
# Full blocks are never written again, so sharing them is safe for ever. A **fork** (several samples from one prompt, a
# beam) is different: both continue from the *same half-full block*, and law 4 says that a shared block is not written.
#
# **Predict:** 6 tokens are written in blocks of 4, then the sequence forks, and both append one token. How many blocks are
# copied?
#
# <!-- zh -->
# ## 7 · 写时复制:序列分叉的时候
#
# 满块不会再写,怎么共享都安全。**分叉**不一样(一个 prompt 采好几份,或者 beam search):两边都要从**同一个没写满的块**接着写,而规矩 4 说共享的块不能写。
#
# **先预测**:分叉前写了 6 个 token,块大小 4。分叉后两边各追加一个 token。要拷贝几块?

# %% id="cow"
kv, refs, spare = [None] * 16, [0] * 4, [2, 3]   # four blocks of 4 slots
kv[0:6], refs[0:2] = "the cat"[0:6], [1, 1]       # a letter stands for a token's KV

def append(table, length, letter):
    block = table[length // 4]
    if refs[block] > 1:                           # shared: copy before writing
        fresh = spare.pop(0)
        kv[fresh * 4 : fresh * 4 + 4] = kv[block * 4 : block * 4 + 4]
        refs[block], refs[fresh], table[length // 4] = refs[block] - 1, 1, fresh
        print(f"  copied block {block} to {fresh}")
    kv[table[length // 4] * 4 + length % 4] = letter

def fork(table):
    for block in table:
        refs[block] += 1
    return list(table)

first = [0, 1]
second = fork(first)
for table, letter in ((first, "r"), (second, "p")):
    append(table, 6, letter)
    print(table, "".join(x for b in table for x in kv[b * 4 : b * 4 + 4] if x), "counts", refs)

# %% [markdown] id="cow-read"
# One copy, not two: the first to write moves out, then the second is alone and writes in place. Block 0 is full and stays
# shared.
#
# vLLM V1 and this engine do without (V0 did not): they share **full blocks only**, found by content; the half-full tail is
# computed twice. Two samples of one prompt are two requests. A block can be found once it is *scheduled*, so they may even
# start in one step. In nano-vllm that step must land first: starting together, they share nothing.
#
# <!-- zh -->
# 一次,不是两次:先写的那个搬出去,剩下的就只有一个人在用,原地写就行。0 号块是满的,继续共享。
#
# vLLM V1 和我们这个引擎都用不上它:只共享**满块**,按内容找,没满的尾巴各算一遍。(vLLM V0 是写时复制。)一个 prompt 采两份,就是两个请求。vLLM 和我们在块被**调度**时就登记,两个同一步进来也能共享;nano-vllm 要等那一步落地才登记,同一步进来的两个什么都共享不到。

# %% [markdown] id="ledger-intro"
# ## 8 · The ledger: how many sequences fit on this GPU?
#
# Three lines, each with a unit:
#
# * **room** = card × utilisation − weights − what the largest step needs;
# * **blocks** = room ÷ bytes of a block;
# * **sequences** = blocks ÷ blocks of *one* sequence, at the length they really have.
#
# Leave the step out for now; section 9 measures it. Change card and model as you like.
#
# <!-- zh -->
# ## 8 · 算笔账:这张 GPU 能放几条序列?
#
# 三行,每行都带单位:
#
# * **余量** = 显存 × 利用率 − 权重 − 最大的一步要用的;
# * **块数** = 余量 ÷ 一块的字节数;
# * **序列数** = 块数 ÷ **一条**序列的块数,按它们真实的长度。
#
# 第一行里「最大的一步」先不算,第 9 节再量。卡和模型随便换。

# %% id="ledger"
from nanoengine.model.config import NAMED_CONFIGS

def kv_blocks(gpu_bytes, name, step_bytes=0, utilization=0.9, size=16):
    model = NAMED_CONFIGS[name]
    room = gpu_bytes * utilization - model.num_parameters() * 2 - step_bytes
    return max(0, int(room // (model.kv_bytes_per_token(2) * size)))

GIB, H200 = 2**30, 150_109_880_320
sizes = {"12 GiB": 12 * GIB, "24 GiB": 24 * GIB, "80 GiB": 80 * GIB, "H200": H200}
print("sequences at once, of       500   4,096  32,768 tokens")
for name in ("qwen3-0.6b", "qwen3-8b"):
    for card, size in sizes.items():
        have = kv_blocks(size, name)
        row = "".join(f"{have // blocks(n, 16):8,}" for n in (500, 4096, 32768))
        print(f"{name:11} {card:7} {row}")

# %% [markdown] id="ledger-read"
# An 8B model on 80 GiB: {{ kv_blocks(80 * GIB, 'qwen3-8b') // blocks(500, 16):,}} sequences, or
# {{ kv_blocks(80 * GIB, 'qwen3-8b') // blocks(32768, 16)}}. So the honest answer asks first: **how long are they?** Then: "about
# {{ kv_blocks(80 * GIB, 'qwen3-8b') * 16 / 1000:.0f}} thousand tokens; divide by what one holds *on average*: the prompt and half
# the answer." (`max_num_seqs` may bind first.)
#
# The interviewers' favourite: Llama-2-70B on 8 cards of 80 GB. 80 layers, 8 KV heads of 128, 2 bytes a number. **Predict** the KV
# bytes of a token, and what each card stores of it if the heads are split over the cards.
#
# <!-- zh -->
# 8B 模型、80 GiB 的卡,可以是 {{ kv_blocks(80 * GIB, 'qwen3-8b') // blocks(500, 16):,}} 条,也可以是 {{ kv_blocks(80 * GIB, 'qwen3-8b') // blocks(32768, 16)}} 条。所以老实的回答要先反问:**它们多长?** 然后再说:「大约 {{ kv_blocks(80 * GIB, 'qwen3-8b') * 16 / 10000:.0f}} 万个 token,除以一条**平均**占着多少:prompt 加上一半的输出。」(`max_num_seqs` 可能先卡住。)
#
# 面试官最爱问的:Llama-2-70B,8 张 80 GB 的卡。80 层,8 个 128 维的 KV head,每个数 2 字节。**先预测**:一个 token 的 KV 多少字节?按 head 分到 8 张卡,每张存多少?

# %% id="seventy"
token = 2 * 80 * 8 * 128 * 2
room = 8 * 80e9 * 0.9 - 70e9 * 2
print(f"KV of a token: {token / 2**10:.0f} KiB, one head a card: {token / 8 / 2**10:.0f} KiB")
print(f"room {room / 1e9:.0f} GB = {room / token / 1e6:.2f} million tokens, "
      f"{room / token / 4096:.0f} sequences of 4,096")
# 16 cards, 8 heads: each head lies on two cards, and a card gains only what its weights give back (lesson 13)
print(f"on 16 cards {(80e9 * 0.9 - 140e9 / 16) / (token / 8) / 1e6:.2f} million, not twice as many")

# %% [markdown] id="profile-intro"
# ## 9 · Estimate against measurement
#
# A real engine does not guess what a step needs. It runs the **largest step it may ever run** once, before the pool
# exists, and looks at the peak. Below, what `nanoengine` measured on an H200, and what the estimate says.
#
# **Predict:** does it matter more how many *tokens* a step may have, or how many *rows* (sequences that get a next token)?
#
# <!-- zh -->
# ## 9 · 估算与实测
#
# 最大的一步要多少,真引擎不猜。它在池子建好之前,把**可能遇到的最大一步**真跑一遍,看显存峰值。下面是 `nanoengine` 在 H200 上量到的,和估算对一对。
#
# **先预测**:一步最多几个 **token**,和一步最多几**行**(有几条序列要采下一个 token),哪个影响更大?

# %% id="profile"
# Recorded 2026-11-29 on one NVIDIA H200, torch 2.11.0: bf16, utilization 0.9, blocks of 16,
# max_num_seqs 1,024. (model, max_num_batched_tokens): (bytes kept for the step, blocks)
RECORD = {
    ("qwen3-0.6b", 2048): (9_115_430_604, 67_562),
    ("qwen3-0.6b", 8192): (9_166_299_955, 67_381),
    ("qwen3-8b", 2048): (9_128_695_654, 46_092),
    ("qwen3-8b", 8192): (9_184_177_049, 46_068),
    ("qwen3-8b", 32768): (9_404_949_196, 45_975),
}
for (name, tokens), (step_bytes, measured) in RECORD.items():
    rough, better = (kv_blocks(H200, name, step) for step in (0, step_bytes))
    print(f"{name:10} {tokens:6} tokens: step {step_bytes / 1e9:.2f} GB, blocks: "
          f"estimate {rough:,}, less the step {better:,}, measured {measured:,}")
table = 1024 * 151_936 * 4  # bytes of all rows' logits in fp32
peak = (RECORD["qwen3-8b", 2048][0] - table - 2**28) / 1.1  # less what was kept for graphs, and 256 MiB
print(f"peak {peak / 1e9:.1f} GB: {peak / table:.0f} times the logits, {table / 1e9:.2f} GB")

# %% [markdown] id="profile-read"
# The estimate is {{ kv_blocks(H200, 'qwen3-8b') / 46_068 * 100 - 100:.0f}}% too high; less the step, within {{ abs(kv_blocks(H200, 'qwen3-8b', 9_184_177_049) / 46_068 * 100 - 100):.1f}}% (the CUDA context, the driver).
#
# Sixteen times the tokens cost 3% more. What costs here are the **rows**: the peak is {{ peak / table:.0f}} tables of their logits, as the sort
# for top-k and top-p copies and its indices take 8 bytes. (The rest is margin, and room for graphs.)
#
# But forward and sampling peak one after the other: the *larger* counts. Of 32,768 tokens one MLP holds about
# {{ 32768 * (2 * 4096 + 3 * 12288) * 2 / 1e9:.0f}} GB; with 64 rows, sampling takes {{ 64 / 1024 * peak / 1e9:.1f}}, and the tokens decide.
#
# <!-- zh -->
# 粗估多了 {{ kv_blocks(H200, 'qwen3-8b') / 46_068 * 100 - 100:.0f}}%;减去那一步,误差只剩 {{ abs(kv_blocks(H200, 'qwen3-8b', 9_184_177_049) / 46_068 * 100 - 100):.1f}}%(CUDA 上下文和驱动占的)。
#
# token 多到 16 倍,只多占 3%。这里真正费显存的是**行**:峰值是 {{ peak / table:.0f}} 份 logits,因为 top-k、top-p 要排序,排序要拷贝,下标每个 8 字节。(其余是余量,和给 CUDA Graph 留的。)
#
# 不过前向和采样的峰值有先有后,算的是**大的那个**。32,768 个 token,一个 MLP 里约有 {{ 32768 * (2 * 4096 + 3 * 12288) * 2 / 1e9:.0f}} GB;只有 64 行的话,采样才 {{ 64 / 1024 * peak / 1e9:.1f}} GB,那就是 token 说了算。

# %% [markdown] id="misconception"
# > **Common misconception.** "`gpu_memory_utilization=0.9` gives 90% of the card to the KV cache."
# >
# > It is a **ceiling for everything** in use on the card: weights, the step's peak, CUDA's context, and here and in
# > nano-vllm what *other processes* hold, too (vLLM counts only its own). KV gets the rest. From 0.90 to 0.95, an 8B model on a 24 GiB card (2 GB for the step) gets not 5% but
# > {{ kv_blocks(24 * GIB, 'qwen3-8b', 2e9, 0.95) / kv_blocks(24 * GIB, 'qwen3-8b', 2e9, 0.9) * 100 - 100:.0f}}% more KV: the weights are paid for already.
#
# <!-- zh -->
# > **常见误解** 「`gpu_memory_utilization=0.9` 就是 90% 的显存给 KV cache。」
# >
# > 它是卡上**所有占用的上限**:权重、一步的峰值、CUDA 上下文;在我们这里和 nano-vllm 里,**别的进程**占的也算(vLLM 只算自己的)。剩下的才归 KV。24 GiB 的卡跑 8B 模型(一步算 2 GB),从 0.90 提到 0.95,KV 多的不是 5%,而是 {{ kv_blocks(24 * GIB, 'qwen3-8b', 2e9, 0.95) / kv_blocks(24 * GIB, 'qwen3-8b', 2e9, 0.9) * 100 - 100:.0f}}%:权重那份早就付过了。

# %% [markdown] id="negative-intro"
# ## 10 · Where it does not help
#
# So memory decides everything; buy more? **Predict:** A-D with pools of 7 to 48 blocks. From which size on does a larger
# pool no longer save a single step?
#
# <!-- zh -->
# ## 10 · 它帮不上忙的地方
#
# 那显存说了算,多买点?**先预测**:A-D,池子从 7 块到 48 块。从多大开始,再加也省不下一步?

# %% id="negative"
for num_blocks in (7, 8, 10, 11, 12, 14, 15, 16, 48):
    engine = example_engine(num_blocks=num_blocks)
    steps = sum(1 for _ in engine.run())
    preempted = engine.scheduler.num_preemptions
    print(f"{num_blocks:2} blocks: {steps:2} steps, preemptions: {preempted}")

# %% [markdown] id="negative-read"
# From 16 on nobody is preempted, and more blocks buy **nothing**: 12 steps is A's and B's own length. The limit is
# somewhere else now (the batch, the budget, bandwidth).
#
# And look at 11 against 12: with 11 blocks D is not let in early, so nobody is preempted, yet it takes a step longer.
# And 15 blocks preempt twice in 13 steps, 12 blocks once in 18. Preemptions are a symptom, not the cost.
#
# <!-- zh -->
# 16 块起就没人被抢占了,再多给的块**一点用都没有**:12 步就是 A 和 B 自己的长度。这时卡住的是别的(batch、预算、带宽)。
#
# 再比比 11 块和 12 块:11 块时 D 早早进不来,没人被抢占,反而多一步。15 块抢占两次,13 步就完;12 块只抢占一次,却要 18 步。抢占次数是症状,不是代价本身。

# %% [markdown] id="elsewhere"
# ## 11 · What vLLM and nano-vllm do here
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` |
# | --- | --- | --- |
# | blocks | `BlockManager.allocate`, `BlockManager.deallocate` | `BlockPool.get_new_blocks`, `BlockPool.free_blocks` |
# | new block? | `BlockManager.can_append`: remainder 1 | `SingleTypeKVCacheManager.allocate_new_blocks`: ceiling |
# | free list | deque | `FreeKVCacheBlockQueue.remove` is O(1) |
# | total | `ModelRunner.allocate_kv_cache` | `Worker.determine_available_memory` |
#
# Both run a full step and look at the peak: vLLM with all rows, nano-vllm by default with 4 of 512. vLLM sets one block
# aside, the *null block*, for places a sliding window has left. It admits a prompt if all would fit now, but takes
# blocks for *this step*; others may eat the rest.
#
# <!-- zh -->
# ## 11 · vLLM 和 nano-vllm 在这里怎么做
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` |
# | --- | --- | --- |
# | 拿、还 | `BlockManager.allocate`、`BlockManager.deallocate` | `BlockPool.get_new_blocks`、`BlockPool.free_blocks` |
# | 新块 | `BlockManager.can_append`:余 1 | `SingleTypeKVCacheManager.allocate_new_blocks`:向上取整 |
# | 空闲链表 | deque | `FreeKVCacheBlockQueue.remove` 是 O(1) |
# | 块数 | `ModelRunner.allocate_kv_cache` | `Worker.determine_available_memory` |
#
# 两家都是先跑满一步,看峰值:vLLM 的行数也是满的,nano-vllm 默认只有 4 行(上限 512)。vLLM 先从池子里拿走一块当**占位块**(null block),填在滑动窗口已经移走的位置上。接纳一条 prompt 时,它会看整段现在放不放得下,但只拿**这一步**要用的块,剩下的可能被别人拿走。

# %% [markdown] id="recall-intro"
# ## A · Whiteboard, three minutes
#
# Close this page. The three structures, the four laws, and the life of one block that two sequences share, count by
# count.
#
# <!-- zh -->
# ## A · 白板复述,3 分钟
#
# 合上这页。写出三个结构、四条规矩,再画一个被两条序列共享的块的一生,计数怎么变。

# %% id="recall"
recall("05")

# %% [markdown] id="quiz-intro"
# ## B · Closed-book quiz
#
# Five questions; go on with four right.
#
# <!-- zh -->
# ## B · 闭卷测验
#
# 五道题,答对四道再往下走。

# %% id="quiz"
quiz("05")

# %% [markdown] id="hunt-intro"
# ## C · Code hunt
#
# Open these places in your editor. Think first, then unfold.
#
# <!-- zh -->
# ## C · 代码寻宝
#
# 用编辑器跳到下面几处,先自己想,再展开对照。

# %% id="hunt"
hunt("05")

# %% [markdown] id="exercises"
# ## D · Exercises
#
# In `exercises/05_block_manager.ipynb`, checked automatically:
#
# * **05a** the new-block boundary, when blocks are short: as many tokens as fit;
# * **05b** repair a pool that frees a block twice, from its failing trace.
#
# <!-- zh -->
# ## D · 练习
#
# 在 `exercises/zh/05_block_manager.ipynb` 里,自动批改:
#
# * **05a** 新块的边界,块不够的时候:能算几个 token 就算几个;
# * **05b** 一个块还了两次,照着出错的记录把这个池子修好。

# %% [markdown] id="card-intro"
# ## Interview cards
#
# Say each aloud in 30 seconds, then compare.
#
# <!-- zh -->
# ## 面试复述卡
#
# 每张先出声讲 30 秒,再看参考答法。

# %% id="cards"
cards("05")

# %% [markdown] id="next"
# **Next:** lesson 06, prefix caching. A free block still holds somebody's keys and values. Who may have them, and how do
# you know that they are the right ones?
#
# <!-- zh -->
# **下一课**:第 06 课,前缀缓存。空闲块里还留着别人的 K/V。谁可以拿去用?又怎么知道拿到的就是对的?
