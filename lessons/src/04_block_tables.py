# %% [markdown] id="title"
# # Lesson 04 · Block tables
#
# *Where a token's keys and values lie: one division, one remainder, one list.*
#
# **About 55 minutes** · before this: 01, better also 03 · no GPU, no torch · source walked:
# `nanoengine/engine/batch.py`, `nanoengine/sim/slot_runner.py`
#
# After this lesson you can
#
# 1. compute the slot of any token from a block table, and say who reads the table and who reads the slots;
# 2. measure what static reservation wastes, and choose a block size with numbers;
# 3. explain PagedAttention in 30 seconds without the word "paging".
#
# <!-- zh -->
# # 课程 04 · 分页 KV:块表与槽映射
#
# *一个 token 的 K/V 放在哪:一次整除、一次取余、一张表。*
#
# **约 55 分钟** · 前置:01,最好也看过 03 · 不用 GPU,不用 torch · 源码:`nanoengine/engine/batch.py`、`nanoengine/sim/slot_runner.py`
#
# 这一课结束时你会拿到
#
# 1. 给一张块表,能算出任何一个 token 的槽,还能说清块表给谁看、槽给谁看;
# 2. 能量出静态预留浪费多少,拿数字来选块大小;
# 3. 能用 30 秒讲清 PagedAttention,而且不用「分页」这两个字。

# %% id="env" tags=["varies"]
from nanoengine.notebook import cards, hunt, lesson, player, quiz, recall, record, show

lesson("04", lang="en")

# %% [markdown] id="question"
# ## The question
#
# > "Explain PagedAttention in 30 seconds. And please don't say *paging*."
#
# "It is like virtual memory" is the answer everyone has ready. It borrows another mechanism's name and explains nothing:
# what is in the table? Who looks it up, when, and for what? Does a kernel ever see a gap?
#
# This lesson builds the thing itself. It is smaller than its name: **a list of integers per request.**
#
# <!-- zh -->
# ## 面试官的问题
#
# > 「用 30 秒讲讲 PagedAttention。对了,别用『分页』这两个字。」
#
# 「就像操作系统的虚拟内存」,这个答案人人都会。可它只是借了另一个机制的名字,什么都没解释:表里到底存了什么?谁来查、什么时候查、查来干嘛?内核看得见那些「空隙」吗?
#
# 这一课把它亲手做出来。东西比名字小得多:**每个请求一个整数列表。**

# %% [markdown] id="naive-intro"
# ## 1 · First, a dumb version: one strip each
#
# The running example starts here and stays with us until lesson 09: four requests **A-D**, and KV memory for 48 tokens.
# One place for one token's keys and values is a **slot**.
#
# The obvious way to share 48 slots: give each request one strip, long enough for the longest answer allowed. Let the
# limit be 32 tokens.
#
# **Predict:** how many of the four can be in memory at once?
#
# <!-- zh -->
# ## 1 · 先写一个「笨」的版本:一人一条
#
# 贯穿后面几课(到 09)的例子从这里开始:四个请求 **A-D**,KV 显存一共放得下 48 个 token。放一个 token 的 K/V 的位置,叫一个**槽**(slot)。
#
# 48 个槽怎么分?最直觉的办法:每个请求给一条连续的,长度按允许的最大值。假设上限是 32 个 token。
#
# **先预测**:四个请求里,同时放得下几个?

# %% id="naive"
from nanoengine.course.example import REQUESTS

SLOTS, LIMIT = 48, 32
need = {name: len(prompt) + new - 1 for name, (prompt, new) in REQUESTS.items()}
print("at once:", SLOTS // LIMIT)
for name, (prompt, new) in REQUESTS.items():
    print(f"{name}: {len(prompt)} prompt tokens + {new} new: reserved {LIMIT}, uses {need[name]}, "
          f"{LIMIT - need[name]} never touched")

# %% [markdown] id="naive-read"
# One. The others wait in front of 16 free slots. (Why `- 1`? The newest token is only sampled; its keys and values are
# computed when it goes *in*, one step later. The last one never does.)
#
# Four requests prove little; let us draw two thousand. Their **means** are published: ShareGPT conversations, about 161
# tokens in and 338 out (vLLM paper, SOSP 2023, figure 11). Their **shape**, log-normal, is our choice, so the load is
# *synthetic*; put the lengths from your own server in its place.
#
# <!-- zh -->
# 一个。另外三个对着 16 个空槽干等。(为什么要 `- 1`?最新的 token 只是采出来了,K/V 要等下一步把它**喂进去**才算;最后一个永远不会再喂进去。)
#
# 四个请求说明不了什么,那就抽两千个。**均值**有出处:ShareGPT 对话,输入约 161 个 token,输出约 338 个(vLLM 论文,SOSP 2023,图 11)。**分布的形状**(对数正态)是我们定的,所以这是一份**合成**负载;你手上有线上的长度数据,换进来最好。

# %% id="lengths"
import numpy as np

rng, MAX_LEN = np.random.default_rng(4), 4096

def draw(mean, n=2000, sigma=1.0):
    """Log-normal token counts with this mean."""
    return np.maximum(1, rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, n)).astype(int)

chat = np.minimum(draw(161) + draw(338), MAX_LEN)
middle = np.median(chat)
print(f"{len(chat)} requests: mean {chat.mean():.0f}, median {middle:.0f}, longest {chat.max()}")

# %% [markdown] id="waste-intro"
# Reserve 4,096 slots for each. **Predict:** what share of the reserved slots ever holds a token?
#
# <!-- zh -->
# 每个都预留 4096 个槽。**先预测**:预留的槽里,有多大比例真的放过 token?

# %% id="waste"
def empty_share(lengths, block):
    """Share of the slots owned by requests of these final lengths that never hold a token."""
    owned = -(-lengths // block) * block  # whole blocks: round up
    return 1 - lengths.sum() / owned.sum()

static = empty_share(chat, MAX_LEN)
print(f"static reservation: {static:.1%} of the memory never holds a token")

# %% [markdown] id="waste-read"
# **{{ static * 100:.0f}}%** empty, counted when a request *ends*, which is friendly. The vLLM paper measured three ways to
# reserve, in its authors' rebuild of Orca with a limit of 2,048: 20.4% to 38.2% of KV memory held tokens (figure 2).
#
# "Then reserve exactly what each needs." Nobody knows that: the answer ends when the model says so. But the 38.2% are of a
# run that *did* know. Why so little? A gets 21 slots, B the next 17; A finishes; D arrives and needs 25. **Predict:** does
# it fit?
#
# <!-- zh -->
# **{{ static * 100:.0f}}%** 是空的,还是按请求**结束**那一刻算的,已经很客气。vLLM 论文自己复刻了 Orca,在上限 2048 下量过三种预留办法:KV 显存里只有 20.4% 到 38.2% 放着 token(图 2)。
#
# 「那就按真正要用的来预留。」可谁也没法预知:模型说停才停。而且,38.2% 那一种恰恰是**事先知道**长度的。知道了为什么还这么低?A 拿 21 个槽,B 接着拿 17 个;A 结束;这时来了 D,要 25 个。**先预测**:放得下吗?

# %% id="holes"
a, b = need["A"], need["B"]
holes = [a, SLOTS - a - b]  # A's old strip, and the end of memory
free = sum(holes)
print(f"{free} slots free, D needs {need['D']}, the largest hole has {max(holes)}")
print("D fits" if max(holes) >= need["D"] else "D does not fit")

# %% [markdown] id="holes-read"
# {{ free }} slots are free and {{ need['D'] }} do not fit. The paper's three kinds of loss, with their
# shares where each request has a strip of 2,048 (20.4% held tokens):
#
# * **reserved**, 13.3%: a token will come, but not yet;
# * **internal fragmentation**, 57.3%: owned, and no token will ever come. Our {{ static * 100:.0f}}%;
# * **external fragmentation** and others, 8.9%: free, and too small for anyone. That is what just happened. Equal
#   strips lose only the rest at the end of memory; in the run that knew all lengths it was 36.6%.
#
# <!-- zh -->
# 空着 {{ free }} 个,却放不下要 {{ need['D'] }} 个的 D。论文把浪费分成三种,后面的数是每人一条 2048 时各占多少(真放着 token 的只有 20.4%):
#
# * **预留**,13.3%:token 会来,只是还没来;
# * **内部碎片**,57.3%:归你了,可永远不会有 token 来。我们那 {{ static * 100:.0f}}% 就是它;
# * **外部碎片**及其他,8.9%:是空的,但太小,谁也用不上。刚才撞上的就是它。条一样长,只亏显存末尾那点零头;事先知道长度、条长短不一的那一种,这一项高达 36.6%。

# %% [markdown] id="idea"
# ## 2 · Cut memory into equal blocks
#
# All of it comes from one wish: that a request's slots be *adjacent*. Drop the wish.
#
# Cut the 48 slots into 12 **blocks** of 4. A request owns a **list of block ids**, its **block table**, in the order of
# its tokens; the blocks may lie anywhere. It takes one more when the last is full.
#
# Equal pieces: no hole is ever too small. Loss: less than one block a request.
#
# <!-- zh -->
# ## 2 · 切成一样大的块
#
# 上面的麻烦都来自一个念头:一个请求的槽必须**挨着**。放下这个念头。
#
# 把 48 个槽切成 12 个**块**,每块 4 个。每个请求拿着一个**块号的列表**,叫**块表**(block table),按 token 的顺序排;块本身在哪都行。最后一块写满了,再拿一块。
#
# 块都一样大,就没有「太小的洞」。浪费呢:每个请求不到一块。

# %% [markdown] id="formula-predict"
# A has 10 prompt tokens. Say its block table is `[7, 2, 5]`.
#
# **Predict** before you run: in which block is token 9 (the last; we count from 0), at which offset, and in which of the
# 48 slots?
#
# <!-- zh -->
# A 的 prompt 有 10 个 token。假设它的块表是 `[7, 2, 5]`。
#
# **先预测再运行**:第 9 号 token(最后一个,从 0 数)在哪一块?块里第几格?48 个槽里的第几个?

# %% id="formula"
SIZE, table = 4, [7, 2, 5]

def slot(table, position):
    return table[position // SIZE] * SIZE + position % SIZE

for p in (0, 3, 4, 9):
    logical, offset = p // SIZE, p % SIZE
    print(f"token {p}: logical block {logical} -> block {table[logical]}, offset {offset}"
          f" -> slot {slot(table, p)}")

# %% [markdown] id="formula-read"
# That is the whole of "paged" memory:
#
# > **slot(p) = table[p // size] × size + p % size**
#
# *Which* block, *where* it is, how far in. Tokens 3 and 4, neighbours in the text, lie 23 slots apart.
#
# Now the cases that failed. **Predict:** D after A has finished; and how many of the two thousand fit at once into the
# 83,712 tokens that a 12 GB card has for Qwen3-0.6B (lesson 01).
#
# <!-- zh -->
# 「分页」显存的全部内容就是这一行:
#
# > **slot(p) = table[p // size] × size + p % size**
#
# **第几块**、**在哪**、块里第几格。3 号和 4 号 token 在文本里紧挨着,显存里隔 23 个槽。
#
# 再看刚才失败的。**先预测**:A 结束后,D 放得下吗?12 GB 的卡给 Qwen3-0.6B 留 83,712 个 token(第 01 课),那两千个请求同时放得下几个?

# %% id="fits"
from nanoengine.viz import plots

blocks_free = SLOTS // SIZE - -(-need["B"] // SIZE)
print(f"D needs {-(-need['D'] // SIZE)} blocks, {blocks_free} are free, adjacent or not")

def at_once(lengths, block, pool=83_712):
    owned = np.cumsum(-(-lengths // block) * block)
    return int((owned <= pool).sum())

schemes = {"static 4096": MAX_LEN, "blocks of 256": 256, "blocks of 16": 16}
for name, block in schemes.items():
    count, empty = at_once(chat, block), empty_share(chat, block)
    print(f"{name:13} {count:4} requests at once, {empty:6.1%} empty")
plots.bars({name: at_once(chat, block) for name, block in schemes.items()}, unit="requests",
           title="Requests in memory at once")

# %% [markdown] id="fits-read"
# {{ at_once(chat, MAX_LEN) }} requests become {{ at_once(chat, 16) }}: **{{ at_once(chat, 16) / at_once(chat, MAX_LEN):.1f}} times the batch** on the
# same card, by bookkeeping alone. (The paper counted real ones, with strips of 2,048: 7.0 requests in flight became 30.4,
# figure 13a.)
#
# Note how the cell counts: static reservation is not another scheme, it is *blocks of 4,096*. "How large is a block" is the
# only question there ever was.
#
# <!-- zh -->
# {{ at_once(chat, MAX_LEN) }} 个变成 {{ at_once(chat, 16) }} 个:同一张卡,**batch 是原来的 {{ at_once(chat, 16) / at_once(chat, MAX_LEN):.1f}} 倍**,只靠记账。(论文实测,每人一条 2048:同时在跑的请求从平均 7.0 个变成 30.4 个,图 13a。)
#
# 留意这一格的数法:静态预留不是另一种方案,它就是「**块大小 4096**」。从头到尾只有一个问题:块切多大。

# %% [markdown] id="source-intro"
# ## 3 · Open the source: who writes, who reads
#
# A step touches KV twice. New keys and values are **written**: for that the runner gets the **slot mapping**, one slot
# for each token computed in this step. Then all of a row's are **read**, old and new: for that it gets the **block table**
# and the length of each row (a row: one request of the batch).
#
# Writing is per token, reading is per block. That is why there are two arrays.
#
# <!-- zh -->
# ## 3 · 打开源码:谁写,谁读
#
# 一步里碰 KV 两次。新的 K/V 要**写**:runner 拿到的是**槽映射**(slot mapping),这一步算几个 token 就有几个槽。然后每一行(batch 里一个请求一行)的 K/V,旧的连同刚写的,都要**读**:它拿到的是每一行的**块表**和长度。
#
# 写按 token,读按块。所以是两个数组。

# %% id="show-span"
from nanoengine.engine.batch import span_slots

show(span_slots)

# %% [markdown] id="span-read"
# Your formula, for a whole span at once: take the blocks that the span touches, lay out all their slots as a grid (a row
# a block), flatten it, and cut off what lies before `start` and after `end`.
#
# A chunk of prefill may start and end in the middle of a block; both cuts are in the last line.
#
# <!-- zh -->
# 还是你那个公式,只是一次算一整段:取出这一段碰到的块,把它们的槽排成网格(一块一行),拉平,再把 `start` 之前和 `end` 之后的切掉。
#
# prefill 的一个 chunk 可能从块中间开始,也可能在块中间结束,两头的切法都在最后一行。

# %% id="show-gather"
from nanoengine.sim import Done, SlotRunner, expected_output

show(SlotRunner._gather)

# %% [markdown] id="gather-read"
# And this is reading, the **gather**. Look at the pool as a grid (a row a block), pick the rows that the table names, in
# the table's order, flatten, cut at the length. What comes out is in the order of the text, wherever the blocks lie.
#
# The real kernel (lesson 10) does not copy: it walks the table and reads each block in place. Same order, same table, and no
# gap: what is in no table is never looked at.
#
# <!-- zh -->
# 这是读,叫 **gather**。把池子看成网格(一块一行),按块表的顺序挑出那几行,拉平,按长度截断。不管块散在哪,出来的就是文本的顺序。
#
# 真正的内核(第 10 课)不搬数据:它顺着块表走,一块一块就地读。顺序一样,表也一样。「空隙」它根本看不见:没写进块表的,没人会去读。

# %% [markdown] id="yours-intro"
# ## 4 · Your version
#
# Write the runner that the engine talks to; all else is the real engine. A slot holds a token id in place of keys and
# values, and `expected_output` hashes what was *gathered* into the next token: one wrong slot, and the text changes.
#
# `launch` gets a `Batch`. Row i computes `query_lens[i]` tokens now and then has KV for `context_lens[i]`; `input_ids` are
# all rows' new tokens, end to end; `sample_rows` are the rows that bring a token.
#
# Cover the cell and write its two loops first.
#
# <!-- zh -->
# ## 4 · 你来写一遍
#
# 写一个引擎能直接用的 runner,其余全是真引擎。槽里不放 K/V,放 token id;下一个 token 由 `expected_output` 给出,它把 gather 到的内容算成哈希。错一个槽,文本就变了。
#
# `launch` 拿到的是一个 `Batch`:第 i 行这一步算 `query_lens[i]` 个 token,算完有 `context_lens[i]` 个 token 的 KV;`input_ids` 是各行的新 token 首尾相接;`sample_rows` 是要采样的那几行。
#
# 先把下一格遮住,自己写那两个循环。

# %% id="my-runner"
from nanoengine.engine.protocols import Runner

class MyRunner(Runner):
    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.pool = [None] * (num_blocks * block_size)

    def slot(self, table, p):
        return table[p // self.block_size] * self.block_size + p % self.block_size

    def launch(self, batch):
        new_ids = iter(batch.input_ids.tolist())
        for row, table in enumerate(batch.block_tables):
            context = int(batch.context_lens[row])
            for p in range(context - int(batch.query_lens[row]), context):
                self.pool[self.slot(table, p)] = next(new_ids)  # the slot: also in batch.slot_mapping
        sampled = [[] for _ in batch.seqs]
        for row in batch.sample_rows:
            table, context = batch.block_tables[row], int(batch.context_lens[row])
            seen = [self.pool[self.slot(table, p)] for p in range(context)]  # gather
            sampled[row] = expected_output(seen, 1)
        return Done(sampled)

    def close(self):
        pass

# %% id="my-runner-check"
from nanoengine import EngineConfig, SamplingParams
from nanoengine.course.example import example_engine
from nanoengine.engine.llm_engine import LLMEngine

def engine_on(runner):
    """The engine of the example on another runner: budget of 16 tokens, no block held back."""
    config = EngineConfig(max_num_batched_tokens=16, max_num_seqs=4)
    engine = LLMEngine(config, runner=runner)
    for prompt, new in REQUESTS.values():
        engine.add_request(prompt, SamplingParams(max_tokens=new))
    return engine

def outputs(engine):
    seqs = list(engine.sequences.values())
    for _ in engine.run():
        pass
    return [seq.output_ids for seq in seqs]

mine, theirs = outputs(engine_on(MyRunner(12, 4))), outputs(example_engine())
for name, own, package in zip("ABCD", mine, theirs):
    print(f"{name}: {len(own):2} tokens,", "equal" if own == package else "DIFFERENT")

# %% [markdown] id="break-intro"
# Equal, through a prefix-cache hit (lesson 06) and a preemption (lesson 08). Two lines do it: the slot, and the gather in
# the order of positions. Now break the first, as if blocks were adjacent: slot = first block × size + p.
#
# **Predict:** whose text changes, and does anybody survive? Hint: C's table begins with A's blocks.
#
# <!-- zh -->
# 一个不差,中间还经过一次前缀命中(第 06 课)、一次抢占(第 08 课)。要紧的只有两行:算槽那行,和按位置 gather 那行。现在弄坏前一行:让 runner 以为块是挨着的,槽 = 第一块 × 块大小 + p。
#
# **先预测**:谁的输出会变?有人能幸免吗?提示:C 的块表开头就是 A 的块。

# %% id="break"
class Adjacent(MyRunner):
    def slot(self, table, p):
        return (table[0] * self.block_size + p) % len(self.pool)

wrong = outputs(engine_on(Adjacent(12, 4)))
for name, broken, right in zip("ABCD", wrong, theirs):
    same = next((i for i, (x, y) in enumerate(zip(broken, right)) if x != y), len(right))
    print(f"{name}: right for {same} of {len(right)} tokens")

# %% [markdown] id="break-read"
# A and B fail at their second token: C begins with A's blocks, so its "adjacent" slots run straight over A's and B's. D
# comes through, with the same wrong formula: what it wrote in the wrong place it also *read* from the wrong place. Its
# first strip lay behind the others', and after the preemption it ran alone.
#
# That makes this kind of bug nasty. One request on a fresh engine passes. Test with company in the pool and tables out of
# order.
#
# <!-- zh -->
# A 和 B 从第二个 token 起就错了:C 的开头是 A 的块,它那些「挨着的」槽正好从 A、B 头上碾过去。D 却一路正确,用的还是那个错公式:它写错了地方,**读**也从同一个错地方读。头一回它那一条排在别人后面,没人碰到;被抢占之后再跑,池子里只剩它自己。
#
# 这类 bug 讨厌就讨厌在这里:刚启动的引擎、一条请求,测试照样通过。要测,池子里就得有别人,块表就得是乱的。

# %% [markdown] id="key-insight"
# > **Key insight.** A block table moves the question "where is it?" from the *address* to a *list*. Nothing that owns a
# > list needs to be adjacent, or known in size in advance, or owned by one request alone. Growth, preemption, prefix
# > sharing: each is an edit of that list.
#
# <!-- zh -->
# > **关键洞察** 块表把「它在哪」这件事从**地址**挪进了**列表**。有了列表,就不必挨着,不必预知多大,甚至不必独占。变长、抢占、共享前缀,说到底都是改这张列表。

# %% [markdown] id="watch-intro"
# ## 5 · Watch it: logical to physical
#
# The same run, in pictures. Left the pool, a cell a block. Right one request's table: logical block → its slots →
# the physical block.
#
# **Predict** for step 4, in which A computes its 14th token: how many blocks has it, and are they adjacent? And C, which begins
# with the same 8 tokens as A: what are the first two entries of its table?
#
# <!-- zh -->
# ## 5 · 看它跑:逻辑块 → 物理块
#
# 还是那次运行,看图。左边是池子,一格一块。右边是某个请求的块表:逻辑块 → 它的槽 → 物理块。
#
# **先预测**第 4 步:A 正在算第 14 个 token,它有几块?挨着吗?C 开头的 8 个 token 和 A 一样,它的块表前两项是什么?

# %% id="watch-run"
from nanoengine.viz import frame

engine = example_engine()
with record(engine) as trace:
    outputs(engine)
frame(trace, 4, panes=("pool", "table"), selected="A")

# %% id="watch-c"
frame(trace, 4, panes=("pool", "table"), selected="C")

# %% [markdown] id="watch-read"
# A: `{{ trace[4]['block_tables'][0] }}`. Block 11 came late, when the pool had been stirred, so it is far from the
# others. C: `{{ trace[4]['block_tables'][2] }}`: it **starts with A's blocks**. Both tables point at the same two physical
# blocks (hatched, count 2), and the keys and values are there once.
#
# No slot was copied for that: two lists name the same number. Now step through it yourself; at step 3 D gives its blocks
# back, and they come out again in other hands.
#
# <!-- zh -->
# A 是 `{{ trace[4]['block_tables'][0] }}`。11 号块拿得晚,那时池子已经搅乱了,所以离得远。C 是 `{{ trace[4]['block_tables'][2] }}`:**开头就是 A 的块**。两张表指着同样两个物理块(斜纹,计数 2),K/V 只存了一份。
#
# 没有拷贝任何槽,只是两张列表里写了同一个号。下面自己一步步走:第 3 步 D 把块全交出来,后来到了别人手里。

# %% id="player"
player(trace, panes=("why", "batch", "pool", "table"))

# %% [markdown] id="size-intro"
# ## 6 · How large should a block be?
#
# Small blocks waste less. **Predict** the rule of thumb: how many slots does a request waste on average with blocks of
# 16? Then see whether 1 would not be best of all.
#
# <!-- zh -->
# ## 6 · 块该切多大?
#
# 块越小浪费越少。**先预测**一个经验值:块大小 16,平均每个请求浪费几个槽?再想想:取 1 岂不是最好?

# %% id="size"
sizes = [1, 4, 16, 64, 256, 1024, 4096]
for block in sizes:
    blocks = -(-chat // block)
    print(f"block {block:4}: {(blocks * block - chat).mean():7.1f} empty slots a request, "
          f"{empty_share(chat, block):6.1%}, table {blocks.mean():6.1f} entries")
plots.lines(sizes, {"empty": [100 * empty_share(chat, block) for block in sizes]}, logx=True,
            xlabel="tokens a block", ylabel="% of owned slots", title="Empty slots")

# %% [markdown] id="size-read"
# About **half a block a request**, (size − 1) / 2, as long as blocks are small beside the requests. At 16 that is
# {{ empty_share(chat, 16) * 100:.1f}}%, at 256 already {{ empty_share(chat, 256) * 100:.0f}}%. Between 16 and 1 there is
# almost nothing left to win.
#
# And small blocks cost: longer tables, more blocks to take and give back, more lookups, and in the vLLM paper's kernel too
# little to read in parallel. The paper tried (section 7.2): 16 to 128 did well with ShareGPT, only 16 and 32 with Alpaca's
# short requests. It set 16.
#
# <!-- zh -->
# 大约**每个请求半块**:(块大小 − 1) / 2,只要块比请求小得多就成立。16 时浪费 {{ empty_share(chat, 16) * 100:.1f}}%,256 时已经 {{ empty_share(chat, 256) * 100:.0f}}%。从 16 再降到 1,几乎没什么可赚的了。
#
# 小块也有代价:块表更长,拿块还块更频繁,查表更多,在 vLLM 论文的内核里,能并行读的也太少。论文试过(7.2 节):ShareGPT 上 16 到 128 都好,短请求的 Alpaca 上只有 16 和 32 好,于是定了 16。

# %% [markdown] id="size-256"
# Then why is nano-vllm's block 256? Not for memory: **the flash-attn package's paged cache takes multiples of 256
# only**, so that a tile of keys, up to 256 of them, never crosses a block. vLLM ships a flash-attn of its own, for which
# multiples of 16 will do. Our engine has 256 on flash-attn and 16 on its own Triton kernels.
#
# A block size is a contract between the memory manager and the kernel.
#
# <!-- zh -->
# 那 nano-vllm 的块为什么是 256?不是为显存:**flash-attn 这个包的分页缓存只收 256 的倍数**,这样一个 tile(最多 256 个 key)绝不会跨块。vLLM 带的是自己改过的 flash-attn,16 的倍数就行。我们的引擎走 flash-attn 时是 256,走自己的 Triton 内核时是 16。块大小是显存管理和内核之间的一份契约。

# %% [markdown] id="ledger-intro"
# ## 7 · The ledger
#
# What does the bookkeeping itself cost? Qwen3-0.6B, a sequence of 4,096 tokens; a table entry is an int32, a slot an
# int64.
#
# <!-- zh -->
# ## 7 · 算笔账
#
# 记账本身要花多少?Qwen3-0.6B,一条 4096 token 的序列;块表一项是 int32,槽是 int64。

# %% id="ledger"
from nanoengine.model.config import NAMED_CONFIGS

token = NAMED_CONFIGS["qwen3-0.6b"].kv_bytes_per_token(2)
print(f"KV of the sequence: {MAX_LEN * token / 2**20:.0f} MiB")
for block in (1, 16, 256):
    entries = MAX_LEN // block
    print(f"block {block:3}: {block * token / 2**10:6.0f} KiB a block, "
          f"table {entries:4} entries = {entries * 4:6,} bytes")
decode = 256 * 8  # one slot for each of 256 sequences
print(f"slot mapping of a decode step, 256 sequences: {decode:,} bytes")

# %% [markdown] id="ledger-read"
# A table of {{ MAX_LEN // 16 * 4:,}} bytes for {{ MAX_LEN * token // 2**20 }} MiB: one part in
# {{ MAX_LEN * token // (MAX_LEN // 16 * 4):,}}. The table is free; what it costs is the *indirection*, once a block, in the
# kernel.
#
# One table serves all layers: layer 7 has its own K and V arrays, but token p lies at the same slot in each.
#
# <!-- zh -->
# {{ MAX_LEN * token // 2**20 }} MiB 的 KV,块表 {{ MAX_LEN // 16 * 4:,}} 字节:{{ MAX_LEN * token // (MAX_LEN // 16 * 4):,}} 分之一。表本身等于不要钱;要付的是**间接寻址**,在内核里,每块一次。
#
# 所有层共用一张表:每一层有自己的 K、V 数组,但第 p 个 token 在哪一层都是同一个槽。

# %% [markdown] id="misconception"
# > **Common misconception.** "PagedAttention makes attention faster."
# >
# > It computes the same sums over the same numbers, through one more lookup. The paper's own kernel was 20-26% *slower*
# > than FasterTransformer's, which reads contiguous KV (section 7.1). What gets faster is the **engine**: more requests fit, so each
# > reading of the weights serves more of them.
#
# <!-- zh -->
# > **常见误解** 「PagedAttention 让注意力算得更快。」
# >
# > 读的数、做的运算都没变,只是多查一次表。论文自己的注意力内核,比 FasterTransformer 读连续 KV 的内核**慢** 20-26%(7.1 节)。变快的是**引擎**:装得下更多请求,读一遍权重就能多服务几个。

# %% [markdown] id="negative-intro"
# ## 8 · Where it does not help
#
# First, a load whose requests all have exactly the maximum length: a batch job that fills the context. Second, the reading
# itself: one sequence of 8,192 tokens in numpy, its blocks in order and adjacent, then scattered over the pool.
#
# **Predict** both: how many more fit with blocks of 16? And at which block size does scattering hurt?
#
# <!-- zh -->
# ## 8 · 它帮不上忙的地方
#
# 第一,每个请求都正好是最大长度,比如把上下文填满的离线任务。第二,读本身:一条 8192 token 的序列,用 numpy 读,块先是按顺序挨着,再打散到整个池子里。
#
# **都先预测**:块大小 16,能多放几个?块切到多小,打散才吃亏?

# %% id="negative-gather" tags=["varies"]
import time

def milliseconds(grid, ids, into):
    times = []
    for _ in range(21):
        start = time.perf_counter()
        np.take(grid, ids, 0, into, "clip")
        times.append(time.perf_counter() - start)
    return min(times) * 1000

full = np.full(500, MAX_LEN)
print(f"all of maximum length: static {at_once(full, MAX_LEN)} at once, blocks of 16 {at_once(full, 16)}")
pool, out = np.ones((65_536, 128), np.float32), np.empty((8192, 128), np.float32)  # a slot a row
for block in (256, 16, 1):
    grid, into = pool.reshape(-1, block, 128), out.reshape(-1, block, 128)
    adjacent, scattered = np.arange(len(into)), rng.permutation(len(grid))[: len(into)]
    print(f"blocks of {block:3}: adjacent {milliseconds(grid, adjacent, into):.2f} ms, "
          f"scattered {milliseconds(grid, scattered, into):.2f} ms")

# %% [markdown] id="negative-gather-read"
# {{ at_once(full, MAX_LEN)}} and {{ at_once(full, 16)}}: blocks win back what reservation wastes, and here nothing is wasted.
#
# And no read gains by scattering. A large block hides the jump to the next one; single slots pay for every jump. So: one
# request at a time, of known length, on a card with room to spare? Then the plain contiguous cache of lesson 03 is simpler
# and no slower.
#
# <!-- zh -->
# {{ at_once(full, MAX_LEN)}} 对 {{ at_once(full, 16)}}:分块赚回的是预留浪费掉的,这里本来就没浪费。
#
# 对读来说,打散没有任何好处。块大,跳到下一块的代价摊薄了;一格一块,每一格都得跳一次。所以:一次只跑一个请求、长度已知、显存有富余?那就用第 03 课的连续缓存,更简单,也不慢。

# %% [markdown] id="virtual-memory"
# ## 9 · "Like virtual memory": how far?
#
# | | an operating system | an inference engine |
# | --- | --- | --- |
# | who translates | the MMU, at each access | the attention kernel, once a block |
# | a page is missing | fault, then the program goes on | never: blocks are taken *before* the step |
# | memory runs out | evict some pages | give up *all* blocks of one request |
# | sharing | a page mapped twice | a block in two tables: equal tokens **and** equal prefix |
# | a shared one is written | copy on write | never: only full blocks are shared, and full is final |
#
# <!-- zh -->
# ## 9 · 「就像虚拟内存」:像到哪一步?
#
# | | 操作系统 | 推理引擎 |
# | --- | --- | --- |
# | 谁来翻译 | MMU,每次访存 | 注意力内核,每块一次 |
# | 缺页 | 陷入,处理完接着跑 | 不会缺:块在这一步**之前**就拿好 |
# | 内存不够 | 换出几页 | 让一个请求交出**全部**块 |
# | 共享 | 同一页映射两次 | 同一块写进两张表:token 相同**并且**前缀相同 |
# | 往共享的地方写 | 先拷一份(写时复制) | 没有这回事:只共享写满的块,写满就不再改 |

# %% [markdown] id="virtual-memory-read"
# The third line is the deep one. A program may run with half of its pages in memory. Attention needs *every* earlier
# token at *every* step: a request with one block missing is as stuck as one with none. So victims give up everything
# (lesson 08).
#
# <!-- zh -->
# 最要紧的是第三行。程序只有一半页在内存里也能跑。注意力**每一步**都要看**所有**前面的 token:少一块和一块都没有,同样动不了。所以被抢占的,就得全交(第 08 课)。

# %% [markdown] id="elsewhere"
# ## 10 · What vLLM and nano-vllm do here
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` |
# | --- | --- | --- |
# | the table | a Python list in `Sequence` | int32 on the GPU; `BlockTables.append_block_ids` sends only new entries |
# | slots | `ModelRunner.prepare_prefill`, `ModelRunner.prepare_decode`, on the host | `BlockTables.compute_slot_mappings`, a Triton kernel |
# | unused entries | `ModelRunner.prepare_block_tables` pads with −1 | left as they are: the length decides; padded rows name block 0 |
# | block size | 256 | 16 by default, if the backend agrees |
#
# <!-- zh -->
# ## 10 · vLLM 和 nano-vllm 在这里怎么做
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` |
# | --- | --- | --- |
# | 块表 | `Sequence` 里的 Python 列表 | GPU 上的 int32;`BlockTables.append_block_ids` 只传新增的项 |
# | 槽 | `ModelRunner.prepare_prefill`、`ModelRunner.prepare_decode`,在主机上算 | `BlockTables.compute_slot_mappings`,一个 Triton 内核 |
# | 空着的项 | `ModelRunner.prepare_block_tables` 填 −1 | 不管它,长度说了算;补齐的行写 0 号块 |
# | 块大小 | 256 | 默认 16,前提是后端支持 |

# %% [markdown] id="elsewhere-read"
# In both, padded *slots* are −1. Why? A CUDA graph runs a fixed number of rows; the extra ones must write **nowhere**. Slot 0 would
# not do: in our pool it is a real token's place. Our kernels skip negative slots, and a test sees to it.
#
# The vLLM column is its model runner V2, in 0.24 the default for Qwen3 and Llama (`VllmConfig.use_v2_model_runner`). The
# older runner serves most other models: `BlockTable.append_row` writes on the host, and each step copies all rows in use.
# vLLM's block 0 is nobody's.
#
# <!-- zh -->
# 两家补齐的**槽**都是 −1。为什么?CUDA Graph 的行数是固定的,多出来的行必须**哪儿也不写**。写 0 不行:在我们的池子里,0 号槽是某个真 token 的位置。我们的内核遇到负数就跳过,有测试盯着。
#
# 表里 vLLM 那一列是它的 model runner V2。在 0.24 里,Qwen3 和 Llama 默认走它(`VllmConfig.use_v2_model_runner`)。其他模型大多还走老的 runner:`BlockTable.append_row` 写在主机上,每步把用到的行整行拷过去。vLLM 的 0 号块不放任何人的 token。

# %% [markdown] id="recall-intro"
# ## A · Whiteboard, three minutes
#
# Close this page. Draw two requests that share a prefix: tokens, two block tables, the pool. Write the formula, and
# compute one slot.
#
# <!-- zh -->
# ## A · 白板复述,3 分钟
#
# 合上这页。画两个有共同前缀的请求:token、两张块表、池子。写出公式,再算一个槽。

# %% id="recall"
recall("04")

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
quiz("04")

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
hunt("04")

# %% [markdown] id="exercises"
# ## D · Exercises
#
# In `exercises/04_block_tables.ipynb`, checked automatically:
#
# * **04a** the slots of a prefill span, as few contiguous runs;
# * **04b** static against paged: who is admitted, and what lies empty.
#
# <!-- zh -->
# ## D · 练习
#
# 在 `exercises/zh/04_block_tables.ipynb` 里,自动批改:
#
# * **04a** 一段 prefill 的槽,合并成尽量少的连续段;
# * **04b** 静态预留对比分块:谁进得来,空了多少。

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
cards("04")

# %% [markdown] id="next"
# **Next:** lesson 05, the block manager. Tables name blocks; who hands them out, who takes them back, and how does it know
# that nobody else is still reading?
#
# <!-- zh -->
# **下一课**:第 05 课,块管理器。块表里写的是块号;那么谁来发块、谁来收块,它又怎么知道没有别人还在读?
