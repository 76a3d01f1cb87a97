# %% [markdown] id="title"
# # Lesson 03 · Stop recomputing
#
# *The KV cache: what it saves, counted exactly, and the new bottleneck that it leaves behind.*
#
# **About 65 minutes** · after lesson 02 · source walked: `nanoengine/model/decoder.py`, `nanoengine/attention/torch_attention.py`
#
# After this lesson you can
#
# 1. write an inference loop with a contiguous KV cache and prove it equal to recomputing;
# 2. answer "O(n) or O(n²)?" by first saying what is counted;
# 3. draw a roofline and say why decode lies on its slope, and for which batch it leaves it, if ever.
#
# <!-- zh -->
# # 课程 03 · KV cache:别再重算
#
# *KV cache:它省了什么,一笔一笔数清楚;又留下了什么新瓶颈。*
#
# **约 65 分钟** · 前置:第 02 课 · 源码:`nanoengine/model/decoder.py`、`nanoengine/attention/torch_attention.py`
#
# 这一课结束时你会拿到
#
# 1. 能手写一个带连续 KV cache 的推理循环,并证明它和重算一模一样;
# 2. 被问「O(n) 还是 O(n²)?」,能先说清楚数的是什么,再回答;
# 3. 能画出屋顶线,说清 decode 为什么趴在斜坡上,batch 多大才离得开,还是永远离不开。

# %% id="env" tags=["varies"]
from nanoengine.notebook import cards, hunt, lesson, quiz, recall, record, show

lesson("03", lang="en")

# %% [markdown] id="question"
# ## The question
#
# > "Why is decode memory-bound? And doesn't the KV cache make generation linear?"
#
# Two half-truths are common. "The KV cache makes it O(n)": of what? And "decode is slow because of the KV cache": at batch 1 and a
# short context nearly all bytes are *weights*. The interviewer wants numbers: how many FLOPs, how many bytes, which one is the limit.
#
# <!-- zh -->
# ## 面试官的问题
#
# > 「decode 为什么受带宽限制?还有,有了 KV cache,生成不就是线性的吗?」
#
# 有两句话常听到,都只对一半。「KV cache 让它变成 O(n)」:什么的 O(n)?「decode 慢,是因为要读 KV cache」:batch 1、上下文不长时,读的几乎全是**权重**。面试官想听的是数:多少 FLOP,多少字节,卡在哪一个上。

# %% [markdown] id="naive-intro"
# ## 1 · First, the dumb version
#
# No cache: the whole prefix through all layers for each token. The model is SmolLM2-135M, on your machine.
#
# **Predict:** a prompt of 5 tokens, 6 new ones. How many times does *a token* pass through the model?
#
# <!-- zh -->
# ## 1 · 先写「笨」的版本
#
# 没有缓存:每出一个 token,整个前缀都过一遍所有层。模型是 SmolLM2-135M,就在你的机器上。
#
# **先预测**:5 个 token 的 prompt,新生成 6 个。一共有多少**人次**的 token 从模型里走过?

# %% id="load"
import torch

from nanoengine import LLM, EngineConfig, SamplingParams
from nanoengine.attention import AttentionBackend
from nanoengine.attention.torch_attention import dense_attention
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.worker.model_runner import ModelRunner
from nanoengine.model.decoder import full_forward

llm = LLM(max_model_len=1024, kv_cache_gib=0.25)
model, tokenizer, shape = llm.engine.runner.model, llm.tokenizer, llm.model_config
prompts = [tokenizer.encode(p) for p in ("The capital of France is", "Water boils at", "def fibonacci(n):")]
NEW = 6

# %% id="naive"
def generate_naive(ids, steps):
    """steps: gets one list of rows a forward pass; a row is (tokens before, tokens computed)."""
    ids = list(ids)
    for _ in range(NEW):
        steps.append([(0, len(ids))])
        ids.append(int(full_forward(model, ids)[-1].argmax()))
    return ids[-NEW:]

naive_steps = []
naive_output = [generate_naive(ids, naive_steps) for ids in prompts]
first = [n for ((_, n),) in naive_steps[:NEW]]
print("tokens computed in each step:", first, "in all", sum(first))
print(repr(tokenizer.decode(naive_output[0])))

# %% [markdown] id="naive-read"
# {{ sum(first)}} token forwards for {{ NEW}} new tokens. Only {{ len(prompts[0]) + NEW - 1}} tokens ever went in ({{ len(prompts[0])}} of the prompt, {{ NEW - 1}} new); the other {{ sum(first) - len(prompts[0]) - NEW + 1}} forwards
# compute numbers that were there a step before.
#
# **Predict:** four times the text. How much longer does one step take?
#
# <!-- zh -->
# 为了 {{ NEW}} 个新 token 走了 {{ sum(first)}} 人次。真正进过模型的 token 只有 {{ len(prompts[0]) + NEW - 1}} 个(prompt {{ len(prompts[0])}} 个,新的 {{ NEW - 1}} 个),剩下 {{ sum(first) - len(prompts[0]) - NEW + 1}} 人次算的都是上一步已经算过的数。
#
# **先预测**:文本长到四倍,一步的时间变成几倍?

# %% id="naive-cost" tags=["varies"]
from timeit import repeat

def best_of(function, times=2):
    """Seconds of the fastest run: what else the machine does only ever adds."""
    return min(repeat(function, number=1, repeat=times))

for known in (64, 256):
    ids = list(range(1000, 1000 + known))
    seconds = best_of(lambda ids=ids: full_forward(model, ids))
    print(f"{known:4} tokens known: {seconds * 1000:5.0f} ms for one new token")

# %% [markdown] id="idea-intro"
# ## 2 · What may be kept?
#
# The step grows with the text, and one token in it is new. What of the rest could we keep?
#
# Take attention in one layer, at the moment when token *t* is computed. **Predict:** whose q does it need, whose k, whose v? Which of
# those were computed in an earlier step, and would they come out the same now?
#
# <!-- zh -->
# ## 2 · 什么可以留下?
#
# 文本越长,一步越慢,可新的只有一个 token。剩下的能留下什么?
#
# 看某一层注意力,正在算第 *t* 个 token。**先预测**:它要谁的 q、谁的 k、谁的 v?其中哪些前面的步骤已经算过?现在再算,结果还一样吗?

# %% id="reuse"
ids, seen, layers = torch.tensor(prompts[2]), [], len(model.layers)

def spy(q, k, v, cache, metadata, scale):  # the decoder calls it once in each layer
    seen.append((q.clone(), k.clone(), v.clone()))
    return dense_attention(q, k, v, cache, metadata, scale)

with torch.inference_mode():
    for n in (len(ids) - 1, len(ids)):  # one step, and the next
        model(ids[:n], torch.arange(n), spy, [None] * layers, None)  # no caches, no metadata
for i, name in enumerate("qkv"):
    same = all(torch.allclose(old[i], new[i][:-1], atol=1e-4) for old, new in zip(seen, seen[layers:]))
    print(f"{name} of the first {n - 1} tokens, all {layers} layers:", "the same" if same else "DIFFERENT")

# %% [markdown] id="reuse-read"
# All three come out the same: attention is causal, so a new token changes nothing to its left. Which ones are *asked for* again? The new
# token's query meets **all** keys and values; old queries only served old rows. So keep K and V, and let Q go.
#
# K is kept **after** RoPE: its rotation depends on its own position only, and that never changes.
#
# <!-- zh -->
# 三个都没变:注意力是因果的,新来的 token 改变不了它左边的任何东西。可**还用得上**的是谁?新 token 的 q 要见**所有**的 k 和 v;旧的 q 只服务过旧的行,用完就没用了。所以留 K、V,不留 Q。
#
# K 存的是转过 RoPE **之后**的:它怎么转只看自己的位置,而位置不会再变。

# %% [markdown] id="yours-intro"
# ## 3 · Your version
#
# The package's decoder takes attention **as an argument** and hands it two things that it never looks into: this layer's `cache`, and
# the step's `metadata`. So a KV cache is one function: write the new k and v at their place, read all that is there.
#
# Ours is the simplest possible: per layer one contiguous tensor `[2, max_len, kv_heads, head_dim]`, K then V; and as metadata one
# number, `start`: how many tokens stand in it.
#
# <!-- zh -->
# ## 3 · 你来写一遍
#
# 包里的 decoder 把注意力当**参数**收,再把两样东西原样递给它,自己看都不看:这一层的 `cache`,和这一步的 `metadata`。所以 KV cache 就是一个函数:把新的 k、v 写到该在的位置,再把已有的全读出来。
#
# 我们用最简单的:缓存是每层一个连续的张量 `[2, max_len, kv_heads, head_dim]`,先 K 后 V;metadata 只有一个数 `start`:缓存里已经有几个 token。

# %% id="my-attention"
def my_attention(q, k, v, cache, start, scale):
    """q [n, heads, d]; k, v [n, kv_heads, d]: tokens start, start + 1, … ; cache holds those before."""
    n, group = len(q), q.shape[1] // k.shape[1]
    cache[0, start : start + n], cache[1, start : start + n] = k, v  # keep
    if n > 1:  # the prompt: nothing before it
        return dense_attention(q, k, v, None, None, scale)
    keys, values = cache[:, : start + 1].repeat_interleave(group, dim=2)  # GQA: a KV head serves a group
    weights = torch.softmax(scale * torch.einsum("hd,thd->ht", q[0], keys), dim=-1)
    return torch.einsum("ht,thd->hd", weights, values)[None]

# %% id="my-loop"
def new_cache(max_len):
    return torch.zeros(shape.num_hidden_layers, 2, max_len, shape.num_key_value_heads, shape.head_dim)

@torch.inference_mode()
def forward(ids, caches, start):
    """Logits after the last of ``ids``, which stand at positions start, start + 1, …"""
    positions = torch.arange(start, start + len(ids))
    hidden = model(torch.tensor(ids), positions, my_attention, list(caches), start)
    return model.logits(hidden[-1:])[0]

# %% id="my-generate"
def generate_cached(ids, steps):
    caches, output, start, new = new_cache(len(ids) + NEW), [], 0, list(ids)
    while len(output) < NEW:
        steps.append([(start, len(new))])
        logits = forward(new, caches, start)
        start, new = start + len(new), [int(logits.argmax())]
        output += new
    return output

# %% [markdown] id="equal-intro"
# Equal? Tokens are a weak test: compare the **logits** at every position with recomputing. **Predict:** exactly equal, or nearly?
#
# <!-- zh -->
# 一样吗?只比 token 太松了:每个位置的 **logits** 都和重算比。**先预测**:是完全相等,还是差一点点?

# %% id="equal" tags=["varies"]
ids = list(range(1000, 1012))
want, caches = full_forward(model, ids), new_cache(len(ids))
worst = max((forward(ids[i : i + 1], caches, i) - want[i]).abs().max().item() for i in range(len(ids)))
print(f"largest difference {worst:.1e}, logits up to {want.abs().max():.0f}")

# %% id="equal-tokens"
assert worst < 1e-3
cached_steps = []
cached_output = [generate_cached(ids, cached_steps) for ids in prompts]
for ids, a, b in zip(prompts, naive_output, cached_output):
    print("equal" if a == b else "DIFFERENT", repr(tokenizer.decode(ids + b)))
print("tokens computed in each step:", [n for ((_, n),) in cached_steps[:NEW]])

# %% [markdown] id="equal-read"
# Equal up to rounding: the same sums, added in another order. That is what a KV cache is: **not an approximation**. Nothing is
# forgotten and nothing is estimated.
#
# (The last generated token's KV is never computed: nobody comes after it to ask.)
#
# <!-- zh -->
# 除了舍入,完全一样:同样的和,加的顺序不同而已。KV cache **不是近似**:没丢东西,也没估什么东西。
#
# (最后生成的那个 token,KV 一直没算:后面没人来问它了。)

# %% [markdown] id="engine-intro"
# ## 4 · Plug it into the engine
#
# The engine has paged blocks. Make a block as long as a whole sequence, and a block *is* a contiguous cache. A dozen lines turn
# `my_attention` into a backend, and the real engine runs on it, three requests in one batch: their tokens lie end to end, and a row of
# the batch is one request's part.
#
# <!-- zh -->
# ## 4 · 插进真引擎
#
# 引擎里的缓存是分块的。那就让一块和整条序列一样长,一块**就是**一段连续缓存。十来行代码把 `my_attention` 包成一个后端,真引擎就跑在它上面。三个请求拼成一个 batch:token 首尾相接,每个请求的那一段是一行。

# %% id="backend"
class Contiguous(AttentionBackend):
    name, default_block_size = "contiguous", 256
    def prepare(self, batch, block_size, device):
        """(first token of the row, tokens, tokens before, its one block) of each row."""
        first = batch.query_lens.cumsum() - batch.query_lens
        before = batch.context_lens - batch.query_lens  # the context counts the new tokens, too
        lists = (lens.tolist() for lens in (first, batch.query_lens, before))
        return list(zip(*lists, (table[0] for table in batch.block_tables)))

    def __call__(self, q, k, v, cache, rows, scale):  # cache [2, blocks, block_size, kv_heads, head_dim]
        spans = [(slice(f, f + n), start, cache[:, block]) for f, n, start, block in rows]
        return torch.cat([my_attention(q[s], k[s], v[s], own, start, scale) for s, start, own in spans])

# %% id="engine-run"
config = EngineConfig(max_model_len=256, block_size=256, num_blocks=4, enable_prefix_caching=False,
                      vocab_size=shape.vocab_size)
mine = LLMEngine(config, runner=ModelRunner(config, model=model, attention=Contiguous()))
greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
seqs = [mine.add_request(ids, greedy) for ids in prompts]
with record(mine) as trace:
    list(mine.run())
theirs = llm.generate(prompts, greedy, use_tqdm=False)
print("my cache in the engine:", [seq.output_ids == out for seq, out in zip(seqs, naive_output)])
print("the package's own     :", [answer.token_ids == out for answer, out in zip(theirs, naive_output)])

# %% [markdown] id="three-intro"
# ## 5 · Three loops, counted
#
# The naive loop, the cached loop and the engine have produced the same {{ len(prompts) * NEW}} tokens. Now the ledger. For each forward pass: tokens, FLOPs,
# and the bytes that must be read or written at least once.
#
# **Predict:** the cached loop computes far fewer tokens than the naive one. Does it read fewer *bytes*?
#
# <!-- zh -->
# ## 5 · 三个循环,逐笔记账
#
# 笨循环、带缓存的循环、引擎,生成了同样的 {{ len(prompts) * NEW}} 个 token。现在算账。每一次前向数三样:token 数、FLOP、至少要读写一遍的字节。
#
# **先预测**:带缓存的循环算的 token 少得多。它读的**字节**也少吗?

# %% id="cost"
def cost(steps, shape, width=4):
    """(passes, token forwards, FLOPs, bytes) of steps; a step is rows of (tokens before, tokens computed)."""
    head = shape.vocab_size * shape.hidden_size  # tied: the same numbers as the embedding
    layers, kv = shape.num_parameters() - head, shape.kv_bytes_per_token(width)
    pair = 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim  # q·k and weight·v
    rows = [row for step in steps for row in step]
    tokens = sum(n for _, n in rows)
    pairs = sum(sum(range(before + 1, before + n + 1)) for before, n in rows)  # token i looks at i tokens
    flops = 2 * layers * tokens + 2 * head * len(rows) + pair * pairs  # logits only where a row ends
    moved = (layers + head) * width * len(steps)                       # all weights, once a pass
    moved += kv * sum(before + n for before, n in rows)                # read the old KV, write the new
    return len(steps), tokens, flops, moved

# %% id="ledger"
engine_steps = [[(row["start"], row["tokens"]) for row in step["rows"]] for step in trace]
ledger = {"naive": naive_steps, "cached": cached_steps, "engine": engine_steps}
ledger = {name: cost(steps, shape) for name, steps in ledger.items()}
for name, (passes, tokens, flops, moved) in ledger.items():
    print(f"{name:7} {passes:3} passes {tokens:4} token forwards {flops / 1e9:6.1f} GFLOP "
          f"{moved / 1e9:6.2f} GB  {flops / moved:4.1f} FLOP/byte")

# %% [markdown] id="cost-read"
# The cache divides the FLOPs by {{ ledger['naive'][2] / ledger['cached'][2]:.1f}} and leaves the bytes **as they were**: in every pass both loops touch every weight, and K
# and V of every token. So the cached loop gets less out of each byte. The engine reads the weights once for three requests, and saves
# {{ 1 - ledger['engine'][3] / ledger['cached'][3]:.0%}} of the bytes.
#
# First the cache removes arithmetic, then batching removes bytes. In that order: recomputing a long text is limited by arithmetic, and
# fewer bytes gain nothing.
#
# (`full_forward` even computes logits for all positions; we did not charge that.)
#
# <!-- zh -->
# 缓存让 FLOP 只剩 {{ ledger['cached'][2] / ledger['naive'][2]:.0%}},字节却**一点没少**:两个循环每一步都要碰所有权重,还有每个 token 的 K 和 V。所以带缓存之后,每个字节换来的计算反而更少。引擎为三个请求只读一遍权重,字节这才少了 {{ 1 - ledger['engine'][3] / ledger['cached'][3]:.0%}}。
#
# 先由缓存去掉多余的计算,再由拼批去掉多余的搬运。顺序反不得:长文本整段重算时,卡的是算力,少搬字节也快不了。
#
# (`full_forward` 其实连每个位置的 logits 都算了,这笔账没记它头上。)

# %% [markdown] id="bigo-intro"
# ## 6 · "O(n) or O(n²)?", exactly
#
# A prompt of one token, then *n* new ones. Double *n*, and four things grow: token forwards and attention pairs (a query meeting a
# key), without a cache and with one. **Predict** the four factors.
#
# <!-- zh -->
# ## 6 · 把「O(n) 还是 O(n²)」说准
#
# prompt 只有 1 个 token,往后生成 *n* 个。*n* 翻一倍,没有缓存和有缓存,token 前向和注意力的 query-key 对(一个 query 见一个 key)各涨几倍?**先预测**这四个倍数。

# %% id="bigo"
def counts(n, cached):
    """Token forwards and attention pairs of generating n tokens after a prompt of one."""
    if cached:
        return n, n * (n + 1) // 2
    return n * (n + 1) // 2, n * (n + 1) * (n + 2) // 6

for name, cached in (("naive", False), ("cached", True)):
    (tokens, pairs), (tokens2, pairs2) = counts(4096, cached), counts(8192, cached)
    print(f"{name:6} n = 4096: {tokens:12,} token forwards, {pairs:14,} attention pairs")
    print(f"       doubled:  x {tokens2 / tokens:.2f}               x {pairs2 / pairs:.2f}")

# %% id="share"
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.viz.plots import lines

qwen = NAMED_CONFIGS["qwen3-0.6b"]
pair = 4 * qwen.num_hidden_layers * qwen.num_attention_heads * qwen.head_dim
even = 2 * qwen.num_parameters() // pair  # context at which attention takes as many FLOPs as the products

def teraflops(n, cached):
    (tokens, pairs), head = counts(n, cached), qwen.vocab_size * qwen.hidden_size
    return (2 * (qwen.num_parameters() - head) * tokens + 2 * head * n + pair * pairs) / 1e12

sizes = [8**i for i in range(1, 6)]
work = {name: [teraflops(n, cached) for n in sizes] for name, cached in (("no cache", False), ("cache", True))}
lines(sizes, work, xlabel="tokens generated", ylabel="TFLOP in all", logx=True, logy=True,
      title="Qwen3-0.6B: work to generate n tokens")

# %% [markdown] id="bigo-read"
# | | no cache | cache |
# | --- | --- | --- |
# | token forwards (matrix products) | n(n+1)/2, O(n²) | n, O(n) |
# | attention pairs | n(n+1)(n+2)/6, O(n³) | n(n+1)/2, **O(n²)** |
#
# "Linear" is true of the matrix products, which dominate while the context is short. In Qwen3-0.6B a decoded token's attention takes as
# many FLOPs as its products at a context of about {{ even:,}}; further on both curves turn steeper: the higher power takes over.
#
# <!-- zh -->
# | | 没有缓存 | 有缓存 |
# | --- | --- | --- |
# | token 前向(矩阵乘) | n(n+1)/2,O(n²) | n,O(n) |
# | 注意力的 query-key 对 | n(n+1)(n+2)/6,O(n³) | n(n+1)/2,**O(n²)** |
#
# 「线性」说的是矩阵乘,上下文不长时它占大头。Qwen3-0.6B 解码一个 token,上下文到约 {{ even:,}} 时,注意力的 FLOP 和矩阵乘一样多;再往后,两条曲线都变陡:高次的那一项说了算。

# %% [markdown] id="misconception"
# > **Common misconception.** "With a KV cache, each token costs the same."
# >
# > Each token costs the same *matrix products*. Its attention reads all KV before it: a little more with each token, in FLOPs **and** in
# > bytes. The cache turned a cubic sum into a quadratic one; it did not make it linear.
#
# <!-- zh -->
# > **常见误解** 「有了 KV cache,每个 token 的代价都一样。」
# >
# > 一样的是**矩阵乘**。注意力要读前面所有的 KV,每多一个 token 就多一点,FLOP 和字节**都**多。缓存是把三次方的和变成了平方的和,没有变成线性。

# %% [markdown] id="roof-intro"
# ## 7 · The roofline
#
# A machine does at most `peak` FLOPs a second and moves at most `bandwidth` bytes. A step that does I FLOPs for each byte (its arithmetic
# intensity) reaches at most **min(peak, I × bandwidth)**: a slope, where memory is the limit, then a flat roof, where arithmetic is. The
# corner is at I = peak / bandwidth. Measure this machine first.
#
# **Predict:** is a decode step of one sequence left of the corner, or right?
#
# <!-- zh -->
# ## 7 · 屋顶线
#
# 一台机器每秒最多做 `peak` 次 FLOP,最多搬 `bandwidth` 个字节。一步计算,每搬一个字节做 I 次 FLOP(这叫算术强度),最多跑到 **min(peak, I × bandwidth)**:先是斜坡,卡在内存上;再是平顶,卡在算力上。拐角在 I = peak / bandwidth。先量一下这台机器。
#
# **先预测**:单条序列的一步 decode,在拐角左边还是右边?

# %% id="machine" tags=["varies"]
big, matrix = torch.ones(2**26), torch.randn(1024, 1024)
bandwidth = big.numel() * 4 / best_of(big.sum, 5)
peak = 2 * 1024**3 / best_of(lambda: matrix @ matrix, 5)
print(f"this machine: {bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s in float32, "
      f"they meet at {peak / bandwidth:.1f} FLOP/byte")
weight_bytes = shape.num_parameters() * 4
print(f"a decode step cannot be faster than {weight_bytes / bandwidth * 1000:.0f} ms: the weights alone")
caches = new_cache(257)
for start in (64, 256):
    seconds = best_of(lambda start=start: forward([7], caches, start), 5)
    print(f"measured, {start:3} tokens known: {seconds * 1000:.0f} ms")

# %% [markdown] id="machine-read"
# Same lengths as in section 1, where the step grew with the text. Here it hardly can: the KV of 256 tokens is {{ 256 * shape.kv_bytes_per_token(4) / weight_bytes:.0%}} of the bytes.
#
# Why is a *short* text cheap to recompute? A pass over n tokens does about n/2 FLOP a byte in float32. Left of the corner more tokens are
# nearly free, as the weights come anyway; right of it the time grows with n.
#
# The bound leaves out KV, activations and the calls of thirty layers. (A step *below* it? Then measure the bandwidth again.)
#
# <!-- zh -->
# 长度和第 1 节一样。那边文本越长,一步越慢;这边想慢也慢不了多少:256 个 token 的 KV 只占全部字节的 {{ 256 * shape.kv_bytes_per_token(4) / weight_bytes:.0%}}。
#
# 那为什么**短**文本重算也不贵?float32 下,一次算 n 个 token,每字节约做 n/2 次 FLOP。在拐角左边,多算几个 token 几乎白送:权重反正要读;过了拐角,时间才跟着 n 涨。
#
# 这个下限没算 KV、激活值,也没算三十层一次次的调用。(实测比下限还快?那就重新量一遍带宽。)

# %% id="roof" tags=["varies"]
from nanoengine.viz.roofline import roofline

def intensity(shape, batch, before, n=1, width=2):
    _, _, flops, moved = cost([[(before, n)] * batch], shape, width)
    return flops / moved

decode = {f"B={b}": intensity(qwen, b, 1024) for b in (1, 4, 256)}
machines = {"H200, 2026-11-29": (4.28e12, 685e12), "this machine": (bandwidth, peak)}
here = {f"B={b}": intensity(shape, b, 1024, width=4) for b in (1, 8)}
dots = {"H200, 2026-11-29": {**decode, "prefill 512": intensity(qwen, 1, 0, 512)}, "this machine": here}
roofline(machines, dots, title="Decode at context 1024, and a prefill of 512")

# %% [markdown] id="roof-read"
# (The H200 line is a dated record: one card, torch 2.11, device copy 4.28 TB/s and an 8192-cubed bf16 product 685 TFLOP/s, 2026-11-29; Qwen3-0.6B in bf16.
# The dots are counted, not timed.)
#
# Decode of one sequence: {{ decode['B=1']:.1f}} FLOP a byte, on a card that could do {{ 685e12 / 4.28e12:.0f}}. Even at full bandwidth its arithmetic units are busy less than 1% of the time: **memory-bound**. A
# prefill of 512 tokens uses each weight of the layers 512 times, and is under the flat roof: **compute-bound**.
#
# <!-- zh -->
# (H200 那条线是带日期的记录:一张卡,torch 2.11,设备内拷贝 4.28 TB/s,8192 见方的 bf16 矩阵乘 685 TFLOP/s,2026-11-29;模型是 bf16 的 Qwen3-0.6B。点是数出来的,不是计时。)
#
# 单条序列 decode,每字节 {{ decode['B=1']:.1f}} FLOP,而这张卡每字节做得了 {{ 685e12 / 4.28e12:.0f}} 次。就算带宽跑满,算力单元也有 99% 以上的时间闲着:这就叫**受带宽限制**。512 个 token 的 prefill,各层的每个权重都用 512 次,已经到了平顶:**受算力限制**。

# %% [markdown] id="key-insight"
# > **Key insight.** The KV cache does not remove the cost, it **changes its currency**: from arithmetic to memory traffic. What is left of a
# > decode step is reading, all weights and all KV, for one token each. So most of what comes later, batching, prefix caching, quantised weights
# > and KV, speculation, is about bytes: fewer of them, or more work for each.
#
# <!-- zh -->
# > **关键洞察** KV cache 没有消灭代价,只是**换了一种货币**:从算力换成内存搬运。剩下的 decode,一步就是「读」:全部权重、全部 KV,每条序列只换回一个 token。所以后面的大半内容,拼批、前缀缓存、权重和 KV 的量化、投机解码,说到底都在打字节的主意:要么少读,要么读一次多用几回。

# %% [markdown] id="batch-intro"
# ## 8 · Can a batch lift it off the slope?
#
# More sequences use each weight more often. **Predict:** at context 1024, which batch makes decode on the H200 compute-bound?
#
# <!-- zh -->
# ## 8 · 加大 batch,能离开斜坡吗?
#
# 序列多了,每个权重就多用几次。**先预测**:上下文 1024,H200 上 batch 多大,decode 才转为受算力限制?

# %% id="batch"
batches = [4**i for i in range(9)]
curves = {f"context {c}": [intensity(qwen, b, c) for b in batches] for c in (0, 128, 1024)}
curves["H200: 160 FLOP/byte"] = [685e12 / 4.28e12] * len(batches)
lines(batches, curves, xlabel="batch", ylabel="FLOP a byte", logx=True, logy=True,
      title="Arithmetic intensity of decode")

# %% [markdown] id="batch-read"
# With no context the line crosses. At context 1024 it stays below **for ever**, at {{ curves['context 1024'][-1]:.0f}} FLOP a byte. A batch shares the
# weights, but not KV: each sequence brings its own, used **once**, for {{ pair / qwen.kv_bytes_per_token(2):.0f}} FLOP a byte of attention (in bf16, one for each query head of a
# KV head's group). The rest of the {{ curves['context 1024'][-1]:.0f}} is the weights' arithmetic.
#
# "A large batch makes decode compute-bound" is true for short contexts only: here below {{ 2 * qwen.num_parameters() / (685e12 / 4.28e12 * qwen.kv_bytes_per_token(2) - pair):.0f}} tokens. Exercise 03b finds the
# batch, or proves that there is none.
#
# <!-- zh -->
# 没有上下文时,曲线一路上升,越过那条线。上下文 1024 时,它**永远**够不着:停在每字节 {{ curves['context 1024'][-1]:.0f}} FLOP。权重可以大家分摊,KV 不行:每条序列都带着自己的 KV,而且**只用一次**,一个字节只换来 {{ pair / qwen.kv_bytes_per_token(2):.0f}} FLOP 的注意力(bf16 下,一个 KV head 那一组里有几个 query head 就是几)。{{ curves['context 1024'][-1]:.0f}} 里其余的,是权重那边的计算。
#
# 「batch 大了 decode 就受算力限制」,只在上下文短的时候对:这里是不到 {{ 2 * qwen.num_parameters() / (685e12 / 4.28e12 * qwen.kv_bytes_per_token(2) - pair):.0f}} 个 token。练习 03b 就是求出这个 batch,或者证明它不存在。

# %% [markdown] id="source-intro"
# ## 9 · Open the source
#
# Now the package's own: the same two moves, write then read, but through blocks (lesson 04).
#
# <!-- zh -->
# ## 9 · 打开源码
#
# 看包里自己的:还是那两步,先写后读,只是隔着一层块(第 04 课)。

# %% id="show-attention"
from nanoengine.attention.torch_attention import TorchAttention
from nanoengine.model.decoder import Attention

show(TorchAttention.__call__, highlight=("store", "gather"))

# %% id="show-decoder"
show(Attention.forward, highlight="ctx.attention(q, k, v")

# %% [markdown] id="source-walk"
# * `store` comes **first**: the new token must see itself.
# * `row.blocks is None` is our `n > 1` case: a prompt with nothing before it attends to its own k and v. With a prefix before it
#   (a chunk, a cache hit) it gathers, and needs a mask that is **shifted**: exercise 03a.
# * The decoder only passes the layer's `kv_cache` on. Paging, quantised KV or your tensor: the backend's business alone.
#
# <!-- zh -->
# * `store` 在**前**:新 token 得看得见自己。
# * `row.blocks is None` 就是我们的 `n > 1`:前面什么都没有的 prompt,直接对自己的 k、v 做注意力。前面有东西(chunk、缓存命中)就要 gather,而且掩码得**错开**:练习 03a。
# * decoder 只管把这一层的 `kv_cache` 往下传。分页、量化的 KV、还是你那个张量,都只是后端自己的事。

# %% [markdown] id="negative-intro"
# ## 10 · Where it does not help
#
# Two cases, both counted. A request for **one** token (a classifier, a reranker). And a cache that is grown with `torch.cat`, as
# in many first versions, and in `DynamicCache`, the default of transformers (5.24). **Predict** how much the cache saves in the first, and what the second costs.
#
# <!-- zh -->
# ## 10 · 它帮不上忙的地方
#
# 两种情况,都数出来。一种是只要**一个** token(分类、重排)。另一种是用 `torch.cat` 拼长的缓存:很多人的第一版就是这么写的,transformers 5.24 默认的 `DynamicCache` 也是。**先预测**:前一种缓存省多少?后一种要多花多少?

# %% id="negative"
for new in (1, 2, 8, 64, 512):
    without = sum(512 + i for i in range(new))
    print(f"prompt 512, {new:3} new: {without / (512 + new - 1):6.1f} x fewer token forwards with a cache")

kv = qwen.kv_bytes_per_token(2)
copied = sum(2 * kv * known for known in range(512, 1024))  # cat reads the old and writes the new, each step
print(f"512 -> 1024 tokens: in place {512 * kv / 1e6:.0f} MB, copied by torch.cat {copied / 1e9:.0f} GB")

# %% [markdown] id="negative-read"
# For one new token: nothing saved at all, only memory spent. And `torch.cat` copies the whole cache in every step: {{ copied / 1e9:.0f}} GB moved to add {{ 512 * kv / 1e6:.0f}} MB. Attention
# must read {{ copied / 2e9:.0f}} GB of KV over these steps anyway; `cat` makes it three times that, in the currency that decode is short of. So one reserves memory ahead; how much, when nobody knows how long an answer
# gets? That is the question of lesson 04.
#
# <!-- zh -->
# 只要一个 token:一点没省,白占内存。而 `torch.cat` 每一步都把整个缓存拷一遍:为了加 {{ 512 * kv / 1e6:.0f}} MB,搬了 {{ copied / 1e9:.0f}} GB。这些步里,注意力本来就得读 {{ copied / 2e9:.0f}} GB 的 KV,`cat` 一来变成三倍,花的正是 decode 最缺的那种货币。所以得提前把地方占好。可谁也不知道回答会有多长,占多少呢?这就是第 04 课的问题。

# %% [markdown] id="elsewhere"
# ## 11 · What vLLM and nano-vllm do here
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` | here |
# | --- | --- | --- | --- |
# | write | `Attention.forward`, a Triton kernel | `FlashAttentionImpl.do_kv_cache_update` | `store` |
# | read | the same method, one of two flash-attn calls | `FlashAttentionImpl.forward` | `TorchAttention` |
# | the step's lengths reach it | by a module global | by one, too: each layer takes it from the `ForwardContext` and hands it on | in `ctx`, an argument all the way |
#
# Both write k and v before they attend, and neither grows a tensor: the pool is allocated once, at start-up.
#
# <!-- zh -->
# ## 11 · vLLM 和 nano-vllm 在这里怎么做
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` | 我们 |
# | --- | --- | --- | --- |
# | 写 | `Attention.forward`,一个 Triton 内核 | `FlashAttentionImpl.do_kv_cache_update` | `store` |
# | 读 | 同一个方法,两个 flash-attn 调用之一 | `FlashAttentionImpl.forward` | `TorchAttention` |
# | 这一步的长度怎么传到 | 模块级全局变量 | 也是全局变量:每层从 `ForwardContext` 里取出,再传给后端 | 放在 `ctx` 里,一路都是参数 |
#
# 两家都是先写 k、v 再做注意力,也都不把张量越拼越长:池子在启动时一次分配好。

# %% [markdown] id="recall-intro"
# ## A · Whiteboard, three minutes
#
# Close this page. On paper: a decode loop with a KV cache in ten lines; the table of section 6; a roofline with decode and prefill on
# it. Then unfold and grade yourself.
#
# <!-- zh -->
# ## A · 白板复述,3 分钟
#
# 合上这页。在纸上写出:十行的带 KV cache 的 decode 循环;第 6 节那张表;一条屋顶线,标上 decode 和 prefill。写完再展开对照。

# %% id="recall"
recall("03")

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
quiz("03")

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
hunt("03")

# %% [markdown] id="exercises"
# ## D · Exercises
#
# In `exercises/03_kv_cache.ipynb`, checked automatically:
#
# * **03a** cached attention for chunks of any length, equal to recomputing;
# * **03b** the batch at which decode stops being bandwidth-bound, or None.
#
# <!-- zh -->
# ## D · 练习
#
# 在 `exercises/zh/03_kv_cache.ipynb` 里,自动批改:
#
# * **03a** 任意长度的 chunk 都能用的带缓存注意力,和重算一样;
# * **03b** batch 多大时 decode 不再受带宽限制;没有就返回 None。

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
cards("03")

# %% [markdown] id="next"
# **Next:** lesson 04, block tables. One contiguous tensor a sequence was easy; now nobody knows how long it must be.
#
# <!-- zh -->
# **下一课**:第 04 课,分页 KV。一条序列一个连续张量,写起来容易;麻烦的是,谁也不知道该留多长。

# %% id="close" tags=["hidden"]
llm.close()
