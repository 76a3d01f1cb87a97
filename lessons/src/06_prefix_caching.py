# %% [markdown] id="title"
# # Lesson 06 · Prefix caching
#
# *The hash chain: how a free block remembers what it held, and how we know that it is the right one.*
#
# **About 55 minutes** · after lesson 05 · no GPU, no torch · source walked: `nanoengine/engine/block_manager.py`
#
# After this lesson you can
#
# 1. write lookup and commit of a prefix cache on a whiteboard;
# 2. say why the hash is chained **and** why tokens are compared all the same;
# 3. name three loads that it does not help, and one that it makes unsafe.
#
# <!-- zh -->
# # 课程 06 · 前缀缓存:哈希链
#
# *哈希链:空闲块怎么记得自己装过什么,我们又凭什么相信它没记错。*
#
# **约 55 分钟** · 前置:第 05 课 · 不用 GPU,不用 torch · 源码:`nanoengine/engine/block_manager.py`
#
# 这一课结束时你会拿到
#
# 1. 能在白板上写出前缀缓存的 lookup 和 commit;
# 2. 能说清哈希为什么要成链,以及**有了链为什么还要比 token**;
# 3. 能举出三种它帮不上忙的负载,外加一种它会泄密的场景。

# %% id="env" tags=["varies"]
from nanoengine.notebook import cards, hunt, keyframes, lesson, quiz, recall, record, show

lesson("06", lang="en", torch=False)

# %% [markdown] id="question"
# ## The question
#
# > "Two users send the same system prompt. How does the engine notice, and can it ever be wrong?"
#
# "It hashes the prompt" is where most answers stop. The interviewer goes on: hashes *what*? When the hashes agree, may you
# hand out that memory? Whose memory is it, when nobody is running? And what does a stranger learn from how fast you were?
#
# <!-- zh -->
# ## 面试官的问题
#
# > 「两个用户发来同样的 system prompt,引擎怎么发现的?它会不会认错?」
#
# 大部分人答到「对 prompt 算个哈希」就停了。面试官会接着问:对**什么**算哈希?哈希一样,这块显存就敢直接给出去?没人在跑的时候,这块显存算谁的?还有,有的请求回得特别快,外人能从这个「快」里看出什么?

# %% [markdown] id="chat-intro"
# ## 1 · First, the dumb version: forget everything
#
# To the engine a chat has no state: each turn sends the whole history again. Here is one, 8 turns, on the unmodified engine.
# `SlotRunner` has no model, so we count **tokens computed**, not seconds: exact, and the same on every machine.
#
# **Guess before you run it**: turn 1 computes 230 prompt tokens. How many does turn 8? How many all eight together?
#
# <!-- zh -->
# ## 1 · 先写「笨」的版本:什么都不记
#
# 对引擎来说,聊天没有状态:每一轮都把整段历史重发一遍。下面就是一段 8 轮的聊天,跑在原封不动的引擎上。`SlotRunner` 没有模型,所以我们数**算了多少个 token**,不计时:数是准的,换台机器也一样。
#
# **先猜再运行**:第 1 轮要算 230 个 prompt token。第 8 轮呢?八轮加起来呢?

# %% id="chat"
import random

from nanoengine import EngineConfig, SamplingParams
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sim import SlotRunner, expected_output

def chat(engine, turns=8):
    """Prompt tokens computed in each turn: 200 of system prompt, then 30 asked and 50 answered a turn."""
    rng, computed = random.Random(0), []
    history = [rng.randrange(1000) for _ in range(200)]
    for _ in range(turns):
        history += [rng.randrange(1000) for _ in range(30)]
        seq = engine.add_request(history, SamplingParams(max_tokens=50))
        computed.append(sum(out.num_prefill_tokens for out in engine.run()))
        history += seq.output_ids
    return computed

no_cache = EngineConfig(enable_prefix_caching=False)
forgetful = chat(LLMEngine(no_cache, runner=SlotRunner(100, 16)))
print("prompt tokens computed, turn by turn:", forgetful)
print("in all:", sum(forgetful), "although only", 200 + 8 * 30, "were new")

# %% [markdown] id="idea-intro"
# ## 2 · The idea: a note on every full block
#
# Each turn is longer than the last: *n* turns compute O(n²) tokens. Yet a turn's KV was in the pool a moment ago: its blocks were freed, and
# the bytes **still lie there**. Nobody kept a note of what they are. So keep one.
#
# Take A and C of the running example (blocks of 4). **Predict:** which blocks of A may C use instead of computing its own?
#
# <!-- zh -->
# ## 2 · 想法:给每个写满的块记一笔
#
# 每一轮都比上一轮长一截,*n* 轮要算 O(n²) 个 token。可上一轮的 KV 刚才还在池子里:块是还了,**数据还躺在原地**,只是没人记下那是什么。那就记一笔。
#
# 还是贯穿例子里的 A 和 C(块大小 4)。**先预测**:A 的哪几个块,C 可以直接拿来用,不用自己算?

# %% id="chop"
from nanoengine.course.example import BLOCK_SIZE, REQUESTS

def full_blocks(tokens, size=BLOCK_SIZE):
    return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

for letter in "AC":
    print(letter, full_blocks(REQUESTS[letter][0]), "+ a rest that fills no block")

# %% [markdown] id="idea-read"
# The first two. Not because their *tokens* are equal, but because all **before** them is, too: from layer 2 on, keys and
# values depend on all tokens to the left. So a block's identity is not "these 4 tokens" but "these 4
# tokens **after that prefix**". (Only full blocks get a note: a half-full one is still being written.)
#
# To find it we need a key for a whole prefix, without hashing the prefix anew each time:
# **key of a block = hash(key of the block before, its own tokens)**.
#
# <!-- zh -->
# 前两个。不是因为这两块的 **token** 一样,而是因为它们**前面**的也全都一样。从第 2 层起,一个 token 的 K/V 就依赖它左边的所有 token。所以一个块的身份不是「这 4 个 token」,而是「**在那段前缀之后的**这 4 个 token」。(只给写满的块记:半满的还要接着写。)
#
# 要能查,就得给整段前缀一个键,又不想每次从头哈希一遍:**这一块的键** = `hash(上一块的键, 这一块的 token)`。

# %% id="chain"
from array import array

from nanoengine.engine.block_manager import ROOT, BlockManager, chain_hash

for letter in "AC":
    key = ROOT
    for i, tokens in enumerate(full_blocks(REQUESTS[letter][0])):
        key = chain_hash(key, array("q", tokens).tobytes())
        print(f"{letter} block {i} {str(tokens):21} key {key:016x}")

anew, chained = sum(range(16, 8192 + 1, 16)), 8192
print(f"tokens hashed for a prompt of 8,192: anew {anew:,}, chained {chained:,}")

# %% [markdown] id="chain-read"
# Equal keys as far as the prompts agree; from the first difference on, nothing agrees any more. The chain is a **path in a
# tree**, written down without pointers. And each token is hashed once; hashing every prefix anew would be
# {{ anew / chained:.1f}} times the work.
#
# <!-- zh -->
# prompt 相同的地方,键就相同;从第一处不同开始,后面再也不会相同。这条链其实是**树上的一条路径**,只是没用指针写。而且每个 token 只哈希一次;要是每块都从头哈希,工作量是它的 {{ anew / chained:.1f}} 倍。

# %% [markdown] id="yours-intro"
# ## 3 · Your version
#
# `PlainPool` is lesson 05 without a cache: tables, reference counts, a free list, in 60 lines. Three methods are open: what
# `lookup` finds, what `commit` notes down, what `take` forgets. Its `allocate` already **revives** found blocks, out of the
# free list. The notes come first. **Then write the three on paper before you read on.**
#
# Does it run? Delete `take` and run A-D again: who is answered wrongly now, and why?
#
# <!-- zh -->
# ## 3 · 你来写一遍
#
# `PlainPool` 就是第 05 课的块管理器,没有缓存:块表、引用计数、空闲链表,60 行。留了三个口子:`lookup` 查到什么,`commit` 记下什么,`take` 忘掉什么;`allocate` 已经会把查到的块从空闲链表里**捞回来**。
#
# 先是记录本。**看完它停一下,三个方法自己在纸上写一遍,再往下看。** 跑通之后,把 `take` 删掉再跑一遍 A-D:这回谁的答案错了?为什么?

# %% id="notes"
from dataclasses import dataclass
from itertools import count

from nanoengine.course.plain_pool import PlainPool

@dataclass
class Note:
    number: int  # of this note, never used again
    parent: int  # number of the note before it, 0 for the first block
    tokens: tuple
    block: int

class Notes(PlainPool):
    """What is known about full blocks: key -> Note."""
    def reset(self):
        super().reset()
        self.notes, self.key_of, self.numbers = {}, {}, count(1)

    def keys(self, seq, num_tokens):
        key = self.root(seq)
        for tokens in full_blocks(seq.token_ids[:num_tokens], self.block_size):
            key = self.hash_function(key, tokens)
            yield key, tokens

    def find(self, key, parent, tokens):
        note = self.notes.get(key)
        return note if note and self.same(note, parent, tokens) else None

    # Three simple choices: section 4 changes the second and the third, section 10 the first.
    root = staticmethod(lambda seq: 0)  # where a chain begins
    hash_function = staticmethod(lambda parent_key, tokens: hash((parent_key, tokens)))
    same = staticmethod(lambda note, parent, tokens: True)  # equal keys: trust the hash

# %% id="my-cache"
class MyCache(Notes):
    def lookup(self, seq):
        found, parent = [], self.root(seq)
        for key, tokens in self.keys(seq, len(seq.token_ids) - 1):  # why - 1? Section 7
            note = self.find(key, parent, tokens)
            if note is None:
                break
            found.append(note.block)
            parent = note.number
        return found

    def commit(self, seq, num_written):
        parent = self.root(seq)
        for block, (key, tokens) in zip(seq.block_table, self.keys(seq, num_written)):
            note = self.find(key, parent, tokens)
            if note is None:
                note = self.notes[key] = Note(next(self.numbers), parent, tokens, block)
                self.key_of[block] = key
            parent = note.number
        seq.num_committed_blocks = num_written // self.block_size

    def take(self):  # the block gets a new owner: forget what it held
        block = super().take()
        key = self.key_of.pop(block, None)
        if key in self.notes and self.notes[key].block == block:
            del self.notes[key]
        return block

# %% id="my-check"
def run_example(block_manager):
    config = EngineConfig(max_num_batched_tokens=16)
    engine = LLMEngine(config, runner=SlotRunner(12, BLOCK_SIZE), block_manager=block_manager)
    seqs = [engine.add_request(p, SamplingParams(max_tokens=n)) for p, n in REQUESTS.values()]
    return sum(1 for _ in engine.run()), seqs

(steps, mine), (their_steps, theirs) = run_example(MyCache), run_example(BlockManager)
for (letter, (prompt, new)), a, b in zip(REQUESTS.items(), mine, theirs):
    equal = a.output_ids == b.output_ids == expected_output(prompt, new)
    verdict = "equal" if equal else "DIFFERENT"
    print(f"{letter}: {verdict}, tokens from the cache: {a.num_cached_tokens} and {b.num_cached_tokens}")
print("steps:", steps, "and", their_steps)

# %% [markdown] id="break-intro"
# ## 4 · Break it on purpose
#
# Is it right, or were we lucky? Serve prompts one after another and compare each answer with `expected_output`. SlotRunner's
# next token is a hash of everything gathered through the block table: **a false hit shows as a wrong token**.
#
# From here on a letter is a **block**: A is [1, 1, 1, 1]. First: no chain, each block keyed by its own tokens alone.
# **Predict** what the second prompt gets.
#
# <!-- zh -->
# ## 4 · 故意弄坏它
#
# 它是真的对,还是运气好?一条一条地喂 prompt,每条都和 `expected_output` 比。SlotRunner 的下一个 token 是顺着块表收集到的一切的哈希:**假命中会直接变成错 token**。
#
# 这一节里,字母指的是**块**:A 就是 [1, 1, 1, 1]。先把链拆掉:每块只用自己的 token 做键。**先预测**第二条 prompt 会拿到什么。

# %% id="no-chain"
def serve(engine, prompt, new=1):
    seq = engine.add_request(prompt, SamplingParams(max_tokens=new))
    for _ in engine.run():
        pass
    return seq

def trial(manager, *prompts):
    engine = LLMEngine(EngineConfig(), runner=SlotRunner(12, 4), block_manager=manager)
    for prompt in prompts:
        seq = serve(engine, prompt, 3)
        right = seq.output_ids == expected_output(prompt, 3)
        print(f"  {seq.num_cached_tokens} tokens from the cache, output {'right' if right else 'WRONG'}")

A, B, C = [1] * 4, [2] * 4, [3] * 4

class NoChain(MyCache):
    hash_function = staticmethod(lambda parent_key, tokens: hash(tokens))

trial(NoChain(12, 4), A + B + [7], B + [7])

# %% [markdown] id="collide-intro"
# It found B's tokens, and B's keys and values were computed **after A**. Same tokens, other KV. Nothing crashed, the text would even
# be plausible.
#
# The chain is back, and somebody found a **collision**: blocks A and C get the same hash, whatever came before. A 64-bit
# non-cryptographic hash makes no promise against a person who searches for one. We force it with a hash function of our own.
#
# **Predict** the output for C, after A was cached, if equal keys are trusted.
#
# <!-- zh -->
# 它找到了 B 的 token,可那份 K/V 是**跟在 A 后面**算出来的。token 一样,KV 不一样。没有崩溃,文本甚至还挺通顺:线上的这种 bug 就长这样。
#
# 链装回去。这回有人找到了一次**碰撞**:A 和 C 两个块,不管前面是什么,哈希都一样。64 位的非加密哈希,从没保证过能防住存心去找的人。我们自己写个哈希函数,强行造一次。
#
# **先预测**:A 已经在缓存里,如果键相等就信,C 会输出什么?

# %% id="collide-block"
def colliding(a, c):
    """A hash under which just the blocks a and c collide: as tuples, and as bytes for the package."""
    twin = {tuple(c): tuple(a), array("q", c).tobytes(): array("q", a).tobytes()}
    return lambda parent_key, tokens: hash((parent_key, twin.get(tokens, tokens))) % 2**64

def with_collision(cache_class):
    cache = cache_class(12, 4)
    cache.hash_function = colliding(A, C)
    return cache

print("trust the hash: [A], then [C]")
trial(with_collision(MyCache), A + [7], C + [7])

# %% [markdown] id="collide-block-read"
# Wrong, and worse than wrong: C's user was answered from **A's memory**. Two ways out. Use a hash that nobody can find
# collisions of (vLLM: SHA-256 by default, and then trust it). Or keep the tokens and compare (nano-vllm, and we).
#
# Comparing the block's own tokens: is that enough?
#
# <!-- zh -->
# 错了,而且不只是错:C 的用户读到的是 **A 的内存**。两条出路:换一个没人找得到碰撞的哈希,然后信它(vLLM 默认 SHA-256);或者把 token 留着,比一比(nano-vllm 和我们)。
#
# 那么,只比这一块自己的 token,够吗?

# %% id="compare-tokens"
class CompareTokens(MyCache):
    same = staticmethod(lambda note, parent, tokens: note.tokens == tokens)

print("compare tokens: [A], then [C]")
trial(with_collision(CompareTokens), A + [7], C + [7])
print("compare tokens: [A][B], then [C], then [C][B]")
trial(with_collision(CompareTokens), A + B + [7], C + [7], C + B + [7])

# %% [markdown] id="parent-read"
# The collision in the block itself is harmless now. But follow the last request: C is found, rightly. The key of [C][B] is
# hash(key of C, B), and that *equals* hash(key of A, B): B's note under A is found, its tokens agree, and its KV belongs
# **to another prefix**. The collision sits in the parent; the child looks perfect.
#
# So ask one thing more: is this note's parent **the very note that I have just matched**?
#
# <!-- zh -->
# 碰撞在块自己身上,这下不怕了。可看最后一条:C 命中,没错;[C][B] 的键是 `hash(C 的键, B)`,它正好**等于** `hash(A 的键, B)`。于是找到了 A 后面那个 B 的记录,token 也对得上,KV 却属于**另一段前缀**。碰撞藏在父块里,子块看上去毫无破绽。
#
# 所以还要多问一句:这条记录的父记录,是不是**我刚刚匹配上的那一条**?

# %% id="compare-parent"
class CompareBoth(MyCache):
    same = staticmethod(lambda note, parent, tokens: note.tokens == tokens and note.parent == parent)

print("compare tokens and parent: [A][B], then [C], then [C][B]")
trial(with_collision(CompareBoth), A + B + [7], C + [7], C + B + [7])
print("the package, the same hash:")
trial(BlockManager(12, 4, hash_function=colliding(A, C)), A + B + [7], C + [7], C + B + [7])

# %% [markdown] id="induction"
# This is a proof by induction: the first block's tokens are compared; each further note names its parent by a number that is
# **never used again** (a block id would not do: blocks get new owners). If the parent is right and the tokens are equal, the
# whole prefix is equal. The hash only *finds* quickly; it is never believed.
#
# <!-- zh -->
# 这就是数学归纳法:第一块比过 token;后面每条记录都用一个**永不重用**的编号指明父记录(用块号不行,块会换主人)。父记录对、token 也对,整段前缀就对。哈希只负责**找得快**,对不对,从来不由它说了算。

# %% [markdown] id="source-intro"
# ## 5 · Open the source
#
# The same in the package. The marked lines you know: the `- 1` and the comparison. What do the others do that yours did not?
#
# <!-- zh -->
# ## 5 · 打开源码
#
# 包里的写法。标出来的两行你已经认识:那个 `- 1`,还有那次比较。其余几行,哪些是你的版本里没有的?

# %% id="show-lookup"
show(BlockManager.lookup, highlight=("content.parent_id != parent", "- 1"))

# %% [markdown] id="lookup-walk"
# * `_key` keeps (hash, token bytes) on the sequence: tokens never change, so a waiting request is hashed once, however often the
#   scheduler looks.
# * `Content` is your `Note` with a *list* of blocks: two sequences may compute the same thing at the same time. A copy **in use**
#   is preferred, as it costs no free block.
# * `lookup` changes nothing: admission may still say no.
#
# <!-- zh -->
# * `_key` 把(哈希,token 字节)存在序列上:token 不会变,排队的请求不管被调度器看多少眼,都只哈希一次。
# * `Content` 就是你的 `Note`,只是块有**一串**:两条序列可能同时各算出一份。优先给**正在用**的那份,不占空闲块。
# * `lookup` 什么都不改:准入那一关还可能说不行。

# %% id="show-commit"
show(BlockManager.commit, highlight="self._forget")

# %% [markdown] id="commit-walk"
# The scheduler calls `commit` as soon as it has **scheduled** a prompt's tokens, though their KV is not written yet: so equal
# prompts in one step share. Section 11 says why that is safe. Generated tokens follow when their step has landed: only then
# does the host know them. It goes on at `num_committed_blocks`; yours starts anew each time.
#
# On a collision the newer content wins; the older one's blocks lose their note. Its children stay in the map, but nobody
# reaches them: their parent's number is gone.
#
# <!-- zh -->
# prompt 的 token 一经**调度**,调度器马上调 `commit`,尽管它们的 KV 还没写:这样,同一步里的相同 prompt 也能共享。为什么不会出错,第 11 节说。生成的 token 要等那一步落地才登记:到那时主机才知道它们的 id。`commit` 从上次停下的 `num_committed_blocks` 接着走;你那版每次都从头走。
#
# 撞上了,新内容留下,旧内容的块丢掉记录。旧内容的子块还在表里,可它们的父编号再也不会出现:谁也走不到那里去。

# %% [markdown] id="evict-intro"
# ## 6 · A free block that remembers
#
# Where does the cache live? In the free list. Eight blocks of 4; five requests, one after another:
#
# **A** 11 tokens · **B** 13 others · **C** begins with A's first 8 · **D** 20 new ones · **E** the same prompt as B
#
# **Predict:** which blocks does D take? And what is left for E?
#
# <!-- zh -->
# ## 6 · 有记性的空闲块
#
# 缓存放在哪?就在空闲链表里。8 个块,每块 4 个 token;五个请求,一个接一个:
#
# **A** 11 个 token · **B** 另外 13 个 · **C** 开头 8 个和 A 一样 · **D** 20 个全新的 · **E** 和 B 一模一样
#
# **先预测**:D 会拿走哪几个块?给 E 剩下什么?

# %% id="evict"
system, other = list(range(100, 108)), list(range(30, 43))
engine = LLMEngine(EngineConfig(), runner=SlotRunner(8, 4))
with record(engine) as trace:
    for prompt in (system + [1, 2, 3], other, system + [9] * 3, list(range(60, 80)), other):
        serve(engine, prompt)
for letter, step in zip("ABCDE", trace.steps):
    print(f"{letter}'s block table:", *step["block_tables"].values())
keyframes(trace, 5, panes=("pool",))

# %% [markdown] id="evict-read"
# Dashed: free, but its content is known; the grey letter says who computed it. A block table shows the order of taking.
#
# * **C** gets blocks 0 and 1 back out of the free list: **revival**. Nobody held them.
# * **D** takes 5, 6, 7 first: never full, nothing to lose. Then 4 and 3: the longest unused are B's, **tail first**.
# * So **E** finds B's head (block 2): one block of three. Had the head gone first, the two that remained would have been out of reach.
#
# <!-- zh -->
# 虚线框:空闲,但内容还认得,灰色字母是谁算的。块表里的先后,就是拿块的先后。
#
# * **C** 从空闲链表里捞回 0、1 号块:这叫**复活**。没人占着,内容还认得。
# * **D** 先拿 5、6、7:没写满过,丢了不心疼。再拿 4、3:最久没用的是 B 的,而且**先拿尾巴**。
# * 所以 **E** 还找得到 B 的头(2 号块),三块命中一块。要是先拿头,剩下两块谁也够不着,等于白留。

# %% [markdown] id="key-insight"
# > **Key insight.** A prefix cache costs no GPU memory. A cached block **is** a free block that has not been forgotten yet: it counts
# > as free for admission, and is given away as soon as somebody needs it. Caching is *freeing without erasing*.
#
# <!-- zh -->
# > **关键洞察** 前缀缓存不占显存。被缓存的块**就是**空闲块,只是还没忘掉自己装过什么:准入时照样算空闲,谁要用随时拿走。所谓缓存,就是**还了,但没擦**。

# %% [markdown] id="full-hit-intro"
# ## 7 · Why does a full hit still compute?
#
# The same prompt twice, block size 4: with 7 tokens, with 8, with 9. **Predict** how many tokens come from the cache the second time.
#
# <!-- zh -->
# ## 7 · 全部命中,为什么还要算?
#
# 同一条 prompt 发两遍,块大小 4,长度分别取 7、8、9。**先预测**:第二遍各有几个 token 来自缓存?

# %% id="full-hit"
for length in (7, 8, 9):
    engine = LLMEngine(EngineConfig(), runner=SlotRunner(12, 4))
    first, again = serve(engine, range(length)), serve(engine, range(length))
    hit = again.num_cached_tokens
    print(f"{length} tokens: {hit} from the cache, {length - hit} computed")

# %% [markdown] id="full-hit-read"
# The next token comes from **logits**, and logits come from running the last token through all layers. KV alone has none. So at
# least one token is computed. And since hits are whole blocks, with 8 tokens the *last block* is computed again: a shared
# block is never written, so the one token cannot go there. With nano-vllm's block of 256, a prompt of 256 hits nothing.
#
# That is the block's doing, not a law: with pages of one token, SGLang's default, one token is enough.
#
# <!-- zh -->
# 下一个 token 来自 **logits**,logits 要把最后一个 token 过一遍所有层才有,光有 KV 是没有的。所以至少要算一个。而命中按整块算:8 个 token 时,**最后一整块**都得重算,因为共享的块不许写,那一个 token 没处放。nano-vllm 的块是 256,一条 256 的 prompt,一个也命中不了。
#
# 这是按块管理带来的,不是铁律:SGLang 默认一页只有一个 token,那就真的只算一个。

# %% [markdown] id="gain-intro"
# ## 8 · The chat again, and the ledger
#
# The chat of section 1, cache on. **Predict** the tokens of turn 8 before you look.
#
# <!-- zh -->
# ## 8 · 再聊一遍,算笔账
#
# 还是第 1 节那段聊天,打开缓存。**先预测**第 8 轮要算几个 token,再看。

# %% id="gain"
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.viz.plots import lines

remembering = chat(LLMEngine(EngineConfig(), runner=SlotRunner(100, 16)))
print("prompt tokens computed:", remembering, "in all", sum(remembering))
qwen = NAMED_CONFIGS["qwen3-0.6b"]
layers = qwen.num_parameters() - qwen.vocab_size * qwen.hidden_size  # the head runs once a prompt
flops_a_token = 2 * layers  # matrix products; attention comes on top
block_mib = 16 * qwen.kv_bytes_per_token(2) / 2**20
saved = sum(forgetful) - sum(remembering)
print(f"tokens not computed            {saved:8,} of {sum(forgetful):,}")
print(f"Qwen3-0.6B: work not done      {saved * flops_a_token / 1e12:8.2f} TFLOP")
print(f"a block of 16: KV that it keeps {block_mib:7.2f} MiB")
print(f"a block of 16: work it saves   {16 * flops_a_token / 1e9:8.1f} GFLOP, each time it is hit")
lines(range(1, 9), {"no cache": forgetful, "prefix cache": remembering},
      xlabel="turn", ylabel="prompt tokens computed", title="A chat of eight turns", from_zero=True)

# %% [markdown] id="gain-read"
# Turn 8 computes {{ remembering[-1]}} tokens instead of {{ forgetful[-1]}}; the chat {{ sum(remembering)}} instead of
# {{ sum(forgetful):,}}. Each turn computes what is **new in it**: O(n²) tokens have become O(n). (Not so attention: a new token
# still looks at the whole history.)
#
# Why {{ remembering[-1]}} and not 30? The last answer token was never computed, and a part-filled block at the end of the history
# has no note. What a hit saves is *prefill*: time to first token. Decode is as long as before, and reads the same KV.
#
# <!-- zh -->
# 第 8 轮只算 {{ remembering[-1]}} 个 token,原来是 {{ forgetful[-1]}} 个;整段聊天 {{ sum(remembering)}} 个,原来 {{ sum(forgetful):,}} 个。每一轮只算**新的部分**:token 从 O(n²) 变成了 O(n)。(注意力不是:每个新 token 还是要看整段历史。)
#
# 为什么是 {{ remembering[-1]}} 而不是 30?上一轮最后一个 token 没算过 KV,历史末尾那个没写满的块也没有记录。另外,命中省的是 **prefill**,也就是首 token 时间;decode 一步不少,要读的 KV 也一点不少。

# %% [markdown] id="misconception"
# > **Common misconception.** "If two prompts contain the same document, its KV is shared."
# >
# > Only if everything **before** it is the same as well. Put the question first and the document second, and nothing is shared.
# > Prompts for a cache are written from the most common to the most particular.
#
# <!-- zh -->
# > **常见误解** 「两条 prompt 里有同一份文档,它的 KV 就能共用。」
# >
# > 前提是它**前面**的也全都一样。把问题放前面、文档放后面,一块都共用不了。想吃到缓存,prompt 就得从「大家都一样的」写到「只有你有的」。

# %% id="order-matters"
document = list(range(500, 756))  # 256 tokens
for name in ("document first", "question first"):
    engine = LLMEngine(EngineConfig(), runner=SlotRunner(100, 16))
    for user in range(4):
        question = [900 + user] * 20
        serve(engine, document + question if name == "document first" else question + document)
    hits, asked = engine.block_manager.num_hit_tokens, engine.block_manager.num_queried_tokens
    print(f"{name}: {hits / asked:4.0%} of the prompt tokens from the cache")

# %% [markdown] id="cliff-intro"
# ## 9 · Where it does not help
#
# Users take turns. Each sends the same 64 tokens of system prompt, then 128 of their own, again and again; the pool has 64 blocks of
# 16. So each leaves 8 full blocks of their own behind, and all share 4.
#
# **Predict** the hit rate with 4, 7, 8 and 10 users. Does it fall gently?
#
# <!-- zh -->
# ## 9 · 它帮不上忙的地方
#
# 几个用户轮流来。每人都发同样的 64 个 token 的 system prompt,再加自己的 128 个,一遍又一遍;池子 64 块,每块 16。也就是说,每个用户留下自己的 8 个满块,另有 4 块大家共用。
#
# **先预测**:4 个、7 个、8 个、10 个用户,命中率各是多少?是慢慢往下降吗?

# %% id="cliff"
def hit_rate(users, rounds=6):
    engine = LLMEngine(EngineConfig(), runner=SlotRunner(64, 16))
    for turn in range(rounds * users):
        serve(engine, list(range(64)) + [100 + turn % users] * 128 + [1], 8)
    pool = engine.block_manager
    return pool.num_hit_tokens / pool.num_queried_tokens

rates = {users: hit_rate(users) for users in range(1, 13)}
lines(list(rates), {"hit rate": [100 * rate for rate in rates.values()]},
      xlabel="users taking turns", ylabel="% of prompt tokens", title="64 blocks, one after another",
      from_zero=True)

# %% [markdown] id="cliff-read"
# It falls off a cliff: {{ rates[7]:.0%}} with 7 users, {{ rates[8]:.0%}} with 8, {{ rates[10]:.0%}} with 10. Least-recently-used has its worst
# case in a **cycle**: whatever you come back for was thrown out just before. What stays is the system prompt, which each request touches.
# (The slow rise before: from the second user on, even a first visit finds the system prompt.)
#
# No gain either: prompts that differ from the first token on; shared heads shorter than a block; long answers to short prompts. The
# price in these cases is small: hashing.
#
# <!-- zh -->
# 不是慢慢降,是断崖:7 个用户 {{ rates[7]:.0%}},8 个 {{ rates[8]:.0%}},10 个 {{ rates[10]:.0%}}。LRU 最怕**转圈**:你回来要的,总是刚刚被扔掉的。还留得住的只有 system prompt,因为每个请求都碰它一下。(前面那段缓升:从第二个用户起,头一次来也能命中 system prompt。)
#
# 还有几种也没用:从第一个 token 就不同;相同的开头不足一块;短 prompt、长回答。这些情况的代价倒是很小:白算几次哈希。

# %% [markdown] id="timing-intro"
# ## 10 · What speed gives away
#
# A hit is faster. Whoever can time a request can therefore ask: *did somebody send this prefix before me?* A victim has sent 6 known
# tokens and a two-digit secret. The attacker knows no answer, only **how much was computed**.
#
# **Predict:** how many guesses does it take?
#
# <!-- zh -->
# ## 10 · 快,也会泄密
#
# 命中就快。那么谁能给请求计时,谁就能问一句:**这段前缀,之前有人发过吗?** 受害者发过 6 个大家都知道的 token,加两位数的秘密。攻击者看不到回答,只看得到**这次算了多少**。
#
# **先预测**:要猜多少次?

# %% id="timing"
known, secret = list(range(100, 106)), [4, 7]

def attack(engine, attacker="mallory"):
    """The guesses that were computed fastest, and how many tokens each kind of guess took."""
    serve_as(engine, attacker, known)  # its own template is cached first
    cost = {}
    for guess in ((a, b) for a in range(10) for b in range(10)):
        seq = serve_as(engine, attacker, known + [*guess, 0])
        cost[guess] = seq.num_prompt_tokens - seq.num_cached_tokens
    least = min(cost.values())
    return [guess for guess in cost if cost[guess] == least], sorted(set(cost.values()))

def serve_as(engine, tenant, prompt):
    return serve(engine, prompt)  # nobody asks who it is

engine = LLMEngine(EngineConfig(), runner=SlotRunner(400, 4))
serve_as(engine, "victim", known + secret + [9])
fastest, costs = attack(engine)
print("tokens computed by a guess:", costs, "- fastest:", fastest)

# %% [markdown] id="timing-read"
# At most {{ 10**len(secret)}} guesses, one of them fast, and that one is the secret. A block must be guessed **whole**: with blocks of 16 and nothing
# known in them the search is hopeless, with a known template around a short secret it is not. (Matched token by token,
# the digits fall one at a time: {{ 10 * len(secret)}} guesses.) Comparing tokens does not help: this is a *true* hit.
#
# The cure is a **salt**: put a secret of each tenant into the root of the chain. Other root, other keys, other notes.
#
# <!-- zh -->
# 最多 {{ 10**len(secret)}} 次,其中只有一次快,那一次就是秘密。一次得猜中**整块**:块大小 16、里面什么都不知道,就没法猜;可如果是固定模板夹着一小段秘密,就猜得动。(缓存要是逐 token 匹配,两位数字就能一位一位试,{{ 10 * len(secret)}} 次就够。)比 token 防不住它,因为这是一次**真**命中。
#
# 解法是加**盐**:把每个租户自己的秘密放进链的根。根不同,键就不同,记录也就不同。

# %% id="salt"
class Salted(CompareBoth):
    def reset(self):
        super().reset()
        self.salts = {}

    def root(self, seq):
        return self.salts[seq.seq_id]  # the first key, and the first block's parent

def serve_as(engine, tenant, prompt):
    seq = engine.add_request(prompt, SamplingParams(max_tokens=1))
    engine.block_manager.salts[seq.seq_id] = f"a secret of {tenant}"
    list(engine.run())
    return seq

engine = LLMEngine(EngineConfig(), runner=SlotRunner(400, 4), block_manager=Salted)
serve_as(engine, "victim", known + secret + [9])
fastest, costs = attack(engine)
print("tokens computed by a guess:", costs, "-", len(fastest), "guesses equally fast")
again = serve_as(engine, "victim", known + secret + [9])
print("the victim's own second request:", again.num_cached_tokens, "tokens from the cache")

# %% [markdown] id="salt-read"
# All {{ len(fastest)}} guesses cost the same; the victim still hits its own. The price: tenants no longer share, not even the system prompt.
# So one salts by **trust** (a company, a user), not by request. It must be secret: a salt that is the user's name is a salt that the
# attacker can send.
#
# <!-- zh -->
# {{ len(fastest)}} 次猜测一样慢,受害者自己照样命中。代价是租户之间不再共享,连 system prompt 也不共享了。所以盐按**信任边界**来分(一家公司、一个用户),不是一个请求一个。而且盐必须保密:拿用户名当盐,攻击者也能照发一份。

# %% [markdown] id="elsewhere"
# ## 11 · What vLLM and nano-vllm do here
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` | here |
# | --- | --- | --- | --- |
# | key | chained xxHash, 64 bits | chained SHA-256 (default) | chained xxHash, 64 bits |
# | what is believed | tokens of the block | the hash | tokens and parent |
# | lookup | `BlockManager.can_allocate` | `KVCacheManager.get_computed_blocks` | `BlockManager.lookup` |
# | revive | `BlockManager.allocate` | `BlockPool.touch` | `BlockManager.allocate` |
# | noted down | after the step | when scheduled | when scheduled |
# | taken first | longest free, tail first | no hash, then the same | no note, then the same |
# | salt | none | `cache_salt` of a request | `cache_salt` of a request |
#
# <!-- zh -->
# ## 11 · vLLM 和 nano-vllm 在这里怎么做
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` | 我们 |
# | --- | --- | --- | --- |
# | 键 | 链式 xxHash,64 位 | 链式 SHA-256(默认) | 链式 xxHash,64 位 |
# | 相信什么 | 这一块的 token | 哈希 | token 和父记录 |
# | 查找 | `BlockManager.can_allocate` | `KVCacheManager.get_computed_blocks` | `BlockManager.lookup` |
# | 复活 | `BlockManager.allocate` | `BlockPool.touch` | `BlockManager.allocate` |
# | 何时登记 | 这一步之后 | 调度时 | 调度时 |
# | 先拿谁 | 空闲最久的,先尾后头 | 没哈希的,再同左 | 没记录的,再同左 |
# | 盐 | 没有 | 请求里的 `cache_salt` | 请求里的 `cache_salt` |

# %% [markdown] id="elsewhere-read"
# vLLM keeps no tokens: nobody knows two inputs with the same SHA-256. It learnt that from section 4: Python's `hash()`, its
# default until 2025, had become predictable with 3.12 (GHSA-rm76-4mrf-v9r8). xxHash (128 bits) is offered with a warning.
#
# Why may blocks be noted down when *scheduled*, there and here? In each layer all KV is stored before any row attends. So
# equal prompts in one step do share.
#
# SGLang keeps a radix tree of tokens: no hash, no collisions, hits of any length at page size 1, more to maintain.
#
# <!-- zh -->
# vLLM 不留 token 来比:SHA-256 相同的两份输入,至今没人找得到。这是吃过亏的:2025 年以前它默认用 Python 自带的 `hash()`,到 3.12 变得可以预测(GHSA-rm76-4mrf-v9r8)。xxHash(128 位)也能选,但附了警告。
#
# vLLM 和我们凭什么**调度**时就敢登记?因为每一层都先把整个 batch 的 KV 写完,再让各行做注意力。所以同一步里的相同 prompt 也能共享。
#
# SGLang 不用哈希,存一棵 token 的基数树:没有碰撞;页大小为 1 时,命中多长都行;但维护起来更麻烦。

# %% [markdown] id="recall-intro"
# ## A · Whiteboard, three minutes
#
# Close this page. On paper: `lookup` and `commit` in about ten lines, what a note holds, and the life of a block from fresh to
# evicted. Then unfold and grade yourself.
#
# <!-- zh -->
# ## A · 白板复述,3 分钟
#
# 合上这页。在纸上写出:`lookup` 和 `commit`,十行左右;一条记录里有什么;一个块从新到被驱逐的一生。写完再展开对照。

# %% id="recall"
recall("06")

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
quiz("06")

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
hunt("06")

# %% [markdown] id="exercises"
# ## D · Exercises
#
# In `exercises/06_prefix_caching.ipynb`, checked automatically:
#
# * **06a** an index that survives any hash function, even a constant one;
# * **06b** the order of requests that hits most, when the pool holds only one.
#
# <!-- zh -->
# ## D · 练习
#
# 在 `exercises/zh/06_prefix_caching.ipynb` 里,自动批改:
#
# * **06a** 写一个索引,给它什么哈希函数都不会错,哪怕是个常数;
# * **06b** 池子只装得下一个请求时,按什么顺序跑命中最多。

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
cards("06")

# %% [markdown] id="next"
# **Next:** lesson 07, continuous batching. Blocks know what they hold; now: who gets them, and when.
#
# <!-- zh -->
# **下一课**:第 07 课,连续批处理。块已经记得自己装过什么,接下来的问题是:给谁,什么时候给。
