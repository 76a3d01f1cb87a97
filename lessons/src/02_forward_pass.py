# %% [markdown] id="title"
# # Lesson 02 · One forward pass
#
# *From weights to logits: four small operations, thirty times.*
#
# **About 75 minutes** · before this: 01 · no GPU · source walked: `nanoengine/model/decoder.py`,
# `nanoengine/model/layers.py`
#
# After this lesson you can
#
# 1. write RMSNorm, RoPE, GQA and SwiGLU from memory, and have Hugging Face confirm it;
# 2. say what GQA shrinks, by how much, and what it leaves alone;
# 3. explain why a RoPE bug survives a look at the text.
#
# <!-- zh -->
# # 课程 02 · 一次前向:从权重到 logits
#
# *四个小操作,重复三十遍。*
#
# **约 75 分钟** · 前置:01 · 不用 GPU · 源码:`nanoengine/model/decoder.py`、`nanoengine/model/layers.py`
#
# 这一课结束时,你
#
# 1. 能默写 RMSNorm、RoPE、GQA、SwiGLU,而且写出来的和 Hugging Face 对得上;
# 2. 能说清 GQA 缩小了什么、缩小几倍、什么没变;
# 3. 能解释 RoPE 写错了,为什么光看文本看不出来。

# %% id="env" tags=["varies"]
from nanoengine.notebook import ask, cards, hunt, lesson, quiz, recall, show

lesson("02", lang="en")

# %% [markdown] id="question"
# ## The question
#
# > "You loaded the weights. What happens between the token ids and the logits, with shapes, please."
#
# "Embedding, attention, MLP, repeat" is the textbook's answer. Then it comes: where is the position added? How many
# heads has K? How do you *know* that your implementation is right?
#
# This lesson builds the whole decoder and holds it to Hugging Face, logit by logit.
#
# <!-- zh -->
# ## 面试官的问题
#
# > 「权重加载好了。从 token id 到 logits,中间发生了什么?带上形状讲。」
#
# 「embedding、attention、MLP,重复」,课本答案到此为止。追问马上就来:位置加在哪?K 有几个头?你怎么**知道**自己写对了?
#
# 这一课把整个 decoder 写出来,再和 Hugging Face 一个 logit 一个 logit 地对。

# %% [markdown] id="naive-intro"
# ## 1 · First, a dumb version: no layers
#
# A decoder begins with a table (id → vector) and ends with the same table the other way round (vector → a score for each
# id). Leave out everything between.
#
# **Predict:** what will it answer to "The capital of France is"?
#
# <!-- zh -->
# ## 1 · 先写一个「笨」的版本:一层都没有
#
# decoder 的开头是一张表(id → 向量),结尾是同一张表反过来用(向量 → 每个 id 的分数)。中间的全都不要。
#
# **先预测**:它对「The capital of France is」会接什么?

# %% id="load"
import torch

from nanoengine import LLM, EngineConfig, LLMEngine, SamplingParams
from nanoengine.loader.embedded import embedded_model_folder
from nanoengine.loader.weights import dummy_weights, read_weights

llm = LLM(max_model_len=512, kv_cache_gib=0.25)
tokenizer, config = llm.tokenizer, llm.model_config
weights = dict(read_weights(embedded_model_folder(), config))
print(f"{len(weights)} tensors, {sum(w.numel() for w in weights.values()):,} numbers")

# %% id="naive"
table = weights["model.embed_tokens.weight"]
ids = tokenizer.encode("The capital of France is")
for _ in range(4):
    ids.append(int((table[ids[-1]] @ table.T).argmax()))  # no layer in between
print(repr(tokenizer.decode(ids)))
answers = (table[::100] @ table.T).argmax(-1)  # of every hundredth id
print(f"{(answers == torch.arange(0, len(table), 100)).sum()} of {len(answers)} answer with themselves")

# %% [markdown] id="naive-read"
# " is" scores highest with itself. Luck: a score counts length as well as direction, and most ids answer
# "{{ tokenizer.decode([int(answers.mode().values)]) }}", the longest vector of all. Nobody looked at "France": without layers no token knows of
# any other. And this one product costs {{ 2 * table.numel() / 1e6:.0f}} MFLOP a token; all layers make it
# {{ 2 * config.num_parameters() / 1e6:.0f}}.
#
# So the layers have two jobs: **carry information from token to token** (attention), and **turn what was collected into
# something new** (MLP). All else is plumbing, and plumbing is where the bugs are.
#
# <!-- zh -->
# 「 is」和自己的分数最高,所以不停重复。这是碰巧:点积既看方向也看长度,多数 id 接的都是「{{ tokenizer.decode([int(answers.mode().values)]) }}」,整张表里最长的向量。「France」根本没人看:没有层,谁也不知道别人的存在。光这一乘就是每 token {{ 2 * table.numel() / 1e6:.0f}} MFLOP;加上所有层,是 {{ 2 * config.num_parameters() / 1e6:.0f}}。
#
# 所以层就干两件事:**在 token 之间搬信息**(attention),**把搬来的东西加工成新的**(MLP)。其余都是管道,而 bug 全在管道里。

# %% [markdown] id="idea"
# ## 2 · The idea: one stream, and things added to it
#
# Each token owns one vector, the **residual stream**. Thirty times, two sub-layers read a *normed copy* of it and **add**
# their result:
#
# `x = x + attention(norm(x))`, then `x = x + mlp(norm(x))`.
#
# Nothing ever overwrites the stream. Four operations are all we need: RMSNorm, RoPE (rotary position embedding), GQA
# (grouped-query attention) and SwiGLU, a gated MLP. One by one.
#
# <!-- zh -->
# ## 2 · 想法:一条流,往上加东西
#
# 每个 token 有一个向量,叫**残差流**(residual stream)。三十层,每层两个子层,各读一份**归一化的副本**,再把结果**加**回去:
#
# `x = x + attention(norm(x))`,然后 `x = x + mlp(norm(x))`。
#
# 谁也不覆盖这条流。要写的操作只有四个:RMSNorm、RoPE(旋转位置编码)、GQA(分组查询注意力)、SwiGLU(带门控的 MLP)。一个一个来。

# %% [markdown] id="norm-intro"
# ### RMSNorm
#
# Divide by the root of the mean square, times a learnt weight: a sub-layer sees inputs of one size, however much was added
# to the stream. No mean is subtracted, there is no bias. `eps` is inside the root, and it differs: 1e-5 in this Llama, 1e-6
# in Qwen3. **Write that line** before you read the next cell.
#
# <!-- zh -->
# ### RMSNorm
#
# 除以均方根,再乘一个学出来的权重:流上加了多少东西都不要紧,子层看到的输入总是一个量级。不减均值,没有偏置。`eps` 在根号里面,而且各家不同:这个 Llama 是 1e-5,Qwen3 是 1e-6。就一行,**先自己写**,再看下一格。

# %% id="norm"
def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

x = torch.randn(3, 576, generator=torch.Generator().manual_seed(2))
ours = rms_norm(7 * x, torch.ones(576), 1e-5)
print("equal to torch:", torch.allclose(ours, torch.rms_norm(7 * x, (576,), eps=1e-5), atol=1e-5))
print("same for x and 7x:", torch.allclose(ours, rms_norm(x, torch.ones(576), 1e-5), atol=1e-3))

# %% [markdown] id="rope-intro"
# ### RoPE: the position is an angle
#
# A score q · k is the same wherever the two tokens stand. RoPE turns each pair of numbers (i, i + d/2) of a **query** and
# a **key** by position × a speed of its own, θ^(−2i/d), with θ = {{ int(config.rope_theta):,}} here; V is left alone. The first pair turns
# one radian a token, the last hardly at all.
#
# **Predict:** if everybody's position grows by 1000, what happens to the scores q · k?
#
# <!-- zh -->
# ### RoPE:位置就是角度
#
# q · k 这个分数,两个 token 摆在哪都一样。RoPE 把 **query** 和 **key** 里的每一对数 (i, i + d/2) 转一个角度:位置 × 这一对自己的转速 θ^(−2i/d),这里 θ = {{ int(config.rope_theta):,}}。V 不动。第一对每个 token 转 1 弧度,最后一对几乎不转。
#
# **先预测**:所有人的位置都加 1000,分数 q · k 会怎么变?

# %% id="rope"
def rope(x, positions, theta):
    """x [tokens, heads, d], positions [tokens]"""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0))

def score(at_q, at_k):
    turned = rope(q, torch.tensor([at_q]), 1e5), rope(k, torch.tensor([at_k]), 1e5)
    return float((turned[0] * turned[1]).sum())

print(f"query 5, key 2: {score(5, 2):.2f}    query 1005, key 1002: {score(1005, 1002):.2f}")
print(f"query 6, key 2: {score(6, 2):.2f}    one further apart")

# %% [markdown] id="rope-read"
# Nothing: turning both by the same angle leaves their dot product. Only the **distance** counts. That is why a key can be
# turned once, cached, and never touched again, however long the text grows.
#
# And it is a trap: shift *everything* and no output shows it; shift a *part*, and each distance between it and the rest
# is wrong, all along the seam.
# Remember that for section 6.
#
# <!-- zh -->
# 不变:两个一起转同样的角度,点积不变。起作用的只有**距离**。所以 key 转一次、存进缓存,以后文本再长也不用再碰它。
#
# 这也是个陷阱:**全体**平移,输出上什么都看不出来;只平移**一部分**,跨过接缝的距离就全错了。先记着,第 6 节要用。

# %% [markdown] id="gqa-intro"
# ### GQA: fewer keys than queries
#
# This model has 9 query heads and 3 KV heads: each K and V serves a **group** of 3 queries. Query head h reads KV head
# h // 3. Scores are divided by √d, so that a sum of d products keeps its size; and no query sees a later key
# (the causal mask).
#
# **Predict:** by what does GQA divide the KV cache here? And the work of the scores?
#
# <!-- zh -->
# ### GQA:K 比 Q 少
#
# 这个模型有 9 个 query head、3 个 KV head:一份 K 和 V 给**一组** 3 个 query 用。第 h 个 query head 读第 h // 3 个 KV head。分数要除以 √d,不然 d 越大,d 个乘积的和就越大;而且谁也不许看后面的 key(因果掩码)。
#
# **先预测**:这里 GQA 让 KV cache 变成几分之一?算分数的计算量呢?

# %% id="gqa"
def attend(q, k, v):
    """q [tokens, heads, d], k and v [tokens, kv_heads, d]"""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))  # 0 0 0 1 1 1 2 2 2
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

from nanoengine.attention.torch_attention import dense_attention

g = torch.Generator().manual_seed(1)
q, k, v = (torch.randn(7, heads, 64, generator=g) for heads in (9, 3, 3))
package = dense_attention(q, k, v, None, None, 64**-0.5)  # None: no cache, one sequence
print("equal to the package:", torch.allclose(attend(q, k, v), package, atol=1e-5))
for name, tensor in {"q": q, "k": k, "v": v}.items():
    print(name, list(tensor.shape))

# %% [markdown] id="gqa-read"
# K and V shrink to a third: their weights, their cache, and what decode reads of it. The **scores do not**: there are still 9
# heads of them. GQA saves memory, not attention arithmetic.
#
# (`repeat_interleave` copies: the cache stays small, but the traffic that GQA saved is spent again. The package groups
# queries instead and copies nothing.)
#
# <!-- zh -->
# K、V 变成三分之一:权重、缓存、decode 要读的缓存都是。**分数没变**:还是 9 个头。GQA 省的是显存,不是 attention 的计算。
#
# (`repeat_interleave` 会真的复制:缓存还是小的,可 GQA 省下的读写又花掉了。包里的做法是把 query 按组堆起来,一份都不复制。)

# %% [markdown] id="decoder-intro"
# ## 3 · Your decoder
#
# SwiGLU is one line: `down(silu(gate(x)) * up(x))`. Put the four together. Qwen3 adds one operation, **QK-norm**: an RMSNorm over
# each query and key head, *before* RoPE.
#
# `w` holds one layer's weights, `c` the config; `note` gets each tensor as it passes: the picture below is drawn from that.
#
# <!-- zh -->
# ## 3 · 你的 decoder
#
# SwiGLU 就一行:`down(silu(gate(x)) * up(x))`。四样东西拼起来。Qwen3 只多一个操作,**QK-norm**:每个 query head、key head 各做一次 RMSNorm,在 RoPE **之前**。
#
# `w` 是这一层的权重,`c` 是 config;每个张量路过,`note` 都会拿到,下面的图就是照它画的。

# %% id="decoder"
from torch.nn.functional import silu

def attention_part(x, w, c, positions, note):
    q, k, v = ((x @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, c.head_dim)) for n in "qkv")
    if c.qk_norm:
        q = rms_norm(q, w["self_attn.q_norm.weight"], c.rms_norm_eps)
        k = rms_norm(k, w["self_attn.k_norm.weight"], c.rms_norm_eps)
    q, k = rope(q, positions, c.rope_theta), rope(k, positions, c.rope_theta)
    out = attend(q, k, v).flatten(1)
    note("q", q), note("k", k), note("v", v), note("attend(q, k, v)", out)
    return out @ w["self_attn.o_proj.weight"].T

def mlp_part(x, w, note):
    inner = silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)
    note("silu(gate) * up", inner)
    return inner @ w["mlp.down_proj.weight"].T

def my_logits(ids, c, weights, note=lambda name, tensor: None):
    x, positions = weights["model.embed_tokens.weight"][ids], torch.arange(len(ids))
    note("embed(ids)", x)
    for i in range(c.num_hidden_layers):
        start, quiet = f"model.layers.{i}.", note if i == 0 else lambda name, tensor: None
        w = {name.removeprefix(start): v for name, v in weights.items() if name.startswith(start)}
        normed = rms_norm(x, w["input_layernorm.weight"], c.rms_norm_eps)
        x = x + attention_part(normed, w, c, positions, quiet)
        normed = rms_norm(x, w["post_attention_layernorm.weight"], c.rms_norm_eps)
        x = x + mlp_part(normed, w, quiet)
    x = rms_norm(x, weights["model.norm.weight"], c.rms_norm_eps)
    note("norm(x)", x)
    return x @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T

# %% id="shapes"
from nanoengine.viz.shapes import shape_flow

TEXT = """Paging lets a process see one long row of addresses while its memory lies in scattered
frames. The page table says which frame holds which page. Two processes may share a frame."""
text_ids, noted = tokenizer.encode(TEXT), []
with torch.inference_mode():
    mine = my_logits(text_ids, config, weights, lambda name, t: noted.append((name, t.shape)))
noted.append(("logits", mine.shape))
shape_flow(noted)

# %% [markdown] id="shapes-read"
# Read it downwards. The first axis never changes: {{ len(text_ids) }} tokens in, {{ len(text_ids) }} rows of logits out. The
# stream is {{ config.hidden_size }} wide; K and V are a third of Q; the MLP widens to {{ config.intermediate_size }}; the
# logits are by far the widest ({{ config.vocab_size:,}}). This engine computes them only for rows that sample.
#
# <!-- zh -->
# 从上往下看。第一维从头到尾不变:{{ len(text_ids) }} 个 token 进,{{ len(text_ids) }} 行 logits 出。流宽 {{ config.hidden_size }};K、V 是 Q 的三分之一;MLP 展宽到 {{ config.intermediate_size }};logits 最宽({{ config.vocab_size:,}})。所以我们的引擎只给要采样的那几行算 logits。

# %% [markdown] id="hf-intro"
# ## 4 · Is it right? Ask somebody else
#
# The rule of this project: feed *the same text* to both (teacher-forced), and compare **all logits at all positions**. Two
# models: the embedded one, and a small random Qwen3, whose norms are not 1, so that QK-norm counts.
#
# **Predict:** how large is the largest error, of logits of size 30, in fp32?
#
# <!-- zh -->
# ## 4 · 写对了吗?找别人对答案
#
# 本项目的规矩:给两边喂**同一段文本**(teacher-forced),比**所有位置的所有 logits**。两个模型:自带的这个,和一个随机权重的小 Qwen3,它的 norm 权重故意不是 1,这样 QK-norm 才起作用。
#
# **先预测**:logits 大小在 30 左右,fp32,最大误差有多大?

# %% id="hf" tags=["varies"]
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from nanoengine.model.config import NAMED_CONFIGS

logging.disable_progress_bar()
qwen = NAMED_CONFIGS["tiny-qwen3"]
# random weights, made large enough for scores to matter
qwen_weights = {name: 5 * w if w.dim() == 2 else w + 0.3 * torch.linspace(-1, 1, len(w))
                for name, w in dummy_weights(qwen)}
sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
sizes += "num_key_value_heads head_dim rms_norm_eps tie_word_embeddings".split()
fields = {name: getattr(qwen, name) for name in sizes}
rope_fields = {"rope_type": "default", "rope_theta": qwen.rope_theta}
theirs = Qwen3ForCausalLM(Qwen3Config(**fields, rope_parameters=rope_fields)).eval()
theirs.load_state_dict(qwen_weights, strict=False)  # no lm_head: it is the embedding table
qwen_ids = torch.arange(60) * 17 % qwen.vocab_size
with torch.inference_mode():
    qwen_hf = theirs(qwen_ids[None]).logits[0]
    theirs = AutoModelForCausalLM.from_pretrained(embedded_model_folder(), dtype=torch.float32)
    smol_hf = theirs(torch.tensor([text_ids])).logits[0]
del theirs

# %% id="compare" tags=["varies"]
import inspect

with torch.inference_mode():
    qwen_mine = my_logits(qwen_ids.tolist(), qwen, qwen_weights)

def compare(name, ours, reference):
    error, same = (ours - reference).abs().max(), (ours.argmax(-1) == reference.argmax(-1)).sum()
    print(f"{name:12} largest logit {reference.abs().max():4.1f}, largest error {error:.1e}, "
          f"argmax equal at {same} of {len(ours)} positions")

whole = (rms_norm, rope, attend, attention_part, mlp_part, my_logits)
num_lines = sum(len(inspect.getsource(f).strip().splitlines()) for f in whole)
print(f"{num_lines} lines against Hugging Face")
compare("SmolLM2-135M", mine, smol_hf)
compare("tiny-qwen3", qwen_mine, qwen_hf)

# %% id="without-qk-norm"
import dataclasses

with torch.inference_mode():
    plain = my_logits(qwen_ids.tolist(), dataclasses.replace(qwen, qk_norm=False), qwen_weights)
print("right with QK-norm:   ", torch.allclose(qwen_mine, qwen_hf, atol=1e-4))
print("right without QK-norm:", torch.allclose(plain, qwen_hf, atol=1e-4))

# %% [markdown] id="compare-read"
# Every position has the same argmax; the error is of the size that fp32 leaves when sums are taken in another order. Not
# zero: "bit for bit" is the wrong demand (lesson 11). And the comparison can fail: leave out QK-norm and it does.
#
# These {{ num_lines }} lines are a real model. Tonight, write them again on an empty page.
#
# <!-- zh -->
# 每个位置的 argmax 都一样;误差就是 fp32 换个求和顺序会留下的那么多。不是零:「逐位相等」是个错误的要求(第 11 课)。而且这个比较真的会失败:去掉 QK-norm,立刻对不上。
#
# 这 {{ num_lines }} 行就是一个真模型。今晚找张白纸,自己再写一遍。

# %% [markdown] id="packed-intro"
# ## 5 · The packed loader
#
# q, k and v are three products of the *same* input. Stack their rows into one matrix and there is one product; cut its
# output. Same numbers, fewer calls: 4 products a layer instead of 7 (gate and up are packed too).
#
# **Predict:** how much faster for 1 row, for 16, for 512?
#
# <!-- zh -->
# ## 5 · 打包加载
#
# q、k、v 是**同一个**输入的三次乘法。把它们的行摞成一个矩阵,乘一次,再把输出切开。结果一样,调用少了:每层 7 次乘法变成 4 次(gate 和 up 也打包)。
#
# **先预测**:1 行、16 行、512 行,各快多少?

# %% id="packed"
parts = [weights[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv"]
packed = torch.cat(parts)  # rows: 576 of q, 192 of k, 192 of v
x = torch.randn(16, config.hidden_size, generator=torch.Generator().manual_seed(3))
one = (x @ packed.T).split([len(p) for p in parts], -1)
three = [x @ p.T for p in parts]
print("packed", list(packed.shape), "from", [list(p.shape) for p in parts])
print("same result:", all(torch.allclose(a, b, atol=1e-4) for a, b in zip(one, three)))

# %% id="packed-cost" tags=["varies"]
import time

def race(*works, repeat=100):
    """Best time of each in microseconds, taken in turn so that a noisy machine treats them alike."""
    best = [float("inf")] * len(works)
    for _ in range(repeat):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], 1e6 * (time.perf_counter() - start))
    return best

threads = torch.get_num_threads()
torch.set_num_threads(1)  # else it is the split over threads that we measure
for rows in (1, 16, 512):
    x = torch.randn(rows, config.hidden_size)
    three, one = race(lambda x=x: [x @ p.T for p in parts], lambda x=x: x @ packed.T)
    print(f"{rows:4} rows: three products {three:6.0f} us, one {one:6.0f} us, {three / one:.2f} times")
torch.set_num_threads(threads)

# %% [markdown] id="packed-read"
# **The negative result.** Packing saves *calls*, not FLOPs and not bytes: the same weights are read, the same numbers multiplied.
# So on one thread, as here, it gains at most what the calls cost, and that fades as rows make the products large: compare 1
# row with 512.
#
# Where many cores share a product, one large matrix is also easier to divide. And on a GPU a call costs microseconds of
# launching, and decode makes hundreds a step: there it pays (lesson 12).
#
# <!-- zh -->
# **什么时候没用。** 打包省的是**调用次数**,不省 FLOP,也不省字节:权重照样读那么多,数照样乘那么多。所以像这里只用一个线程,最多赚回调用本身的开销;行一多、乘法一大,就摊没了:看看 1 行和 512 行。
#
# 核多的时候,一个大矩阵还更好分。而 GPU 上每次调用要几微秒的启动开销,decode 一步有几百次,那里才划算(第 12 课)。

# %% [markdown] id="source-intro"
# ### Open the source
#
# The package's layer, read live, and its norm. Find the two additions to the stream: `residual` is the stream so far, `hidden`
# what the last part adds to it, and the norm that comes next does the addition. Most engines write it so: both share one pass
# over memory.
#
# <!-- zh -->
# ### 打开源码
#
# 包里的一层,还有它的 norm,都是现读的。找一找往流上加的那两次在哪:`residual` 是到目前为止的流,`hidden` 是上一部分要加上去的,加法由紧接着的 norm 来做。大多数引擎都这么写:加法和 norm 合在一趟里。

# %% id="show-layer"
from nanoengine.model.decoder import DecoderLayer
from nanoengine.model.layers import AddRMSNorm, PackedLinear

display(show(DecoderLayer.forward))
show(AddRMSNorm.forward)

# %% id="show-load"
show(PackedLinear.load)

# %% [markdown] id="load-read"
# That is the whole loader: each part knows its `rows`, and a checkpoint tensor is copied there. `Decoder.load_weights` does
# the rest: it maps the names, and complains if a part never came. A missing K would otherwise be whatever was in memory, and
# the answer might still read well: set the K rows of layer 15 to zero, and see.
#
# <!-- zh -->
# 加载器就这么点:每一部分知道自己的 `rows`,checkpoint 里的张量拷到那几行。其余的在 `Decoder.load_weights`:对名字,哪一部分没来就报错。不然,缺的那块 K 里装的就是内存垃圾,而输出说不定还挺通顺:把第 15 层 K 的那几行清零,试试看。

# %% [markdown] id="yours-intro"
# ### Your layer in the real engine
#
# The package's `Decoder` calls its layers one after the other. Put your own in their place: the engine, its blocks, its paged
# attention and the weights stay, the arithmetic is yours. `ctx` brings the step's positions and the attention. A layer that
# has added everything hands on no second tensor. Its tokens, against the package's.
#
# <!-- zh -->
# ### 把你的层插进真引擎
#
# 包里的 `Decoder` 一层一层往下调。把层换成你的:引擎、块、分页 attention、权重都不动,算术换成你的。`ctx` 里有这一步的位置和 attention。全都加完了,第二个张量就不用往下传。然后和包的输出逐 token 比。

# %% id="my-ops"
class MyLayer(torch.nn.Module):
    def __init__(self, theirs):
        super().__init__()
        self.theirs = theirs  # the package's layer, for its weights

    def positions(self, ctx):
        return ctx.positions

    def forward(self, x, nothing, ctx):
        norms = self.theirs.input_layernorm, self.theirs.post_attention_layernorm
        attn, mlp, at = self.theirs.self_attn, self.theirs.mlp, self.positions(ctx)
        qkv = attn.qkv_proj(rms_norm(x, norms[0].weight, norms[0].eps))
        q, k, v = qkv.unflatten(-1, (-1, config.head_dim)).split(
            (attn.num_heads, attn.num_kv_heads, attn.num_kv_heads), 1)
        q, k = rope(q, at, config.rope_theta), rope(k, at, config.rope_theta)
        out = ctx.attention(q, k, v, ctx.kv_cache, ctx.metadata, config.head_dim**-0.5)
        x = x + attn.o_proj(out.flatten(1))
        gate, up = mlp.gate_up_proj(rms_norm(x, norms[1].weight, norms[1].eps)).chunk(2, -1)
        return x + mlp.down_proj(silu(gate) * up), None

# %% id="my-ops-run"
from nanoengine.worker.model_runner import ModelRunner

model = llm.engine.runner.model
package_layers = model.layers
greedy = SamplingParams(temperature=0, max_tokens=16)
prompts = [tokenizer.encode(p) for p in ("Water boils at", "The capital of France is")]

def tokens_with(layers, prompts):
    model.layers = torch.nn.ModuleList(layers)
    settings = EngineConfig(max_model_len=512, num_blocks=32, device="cpu", vocab_size=config.vocab_size)
    engine = LLMEngine(settings, ModelRunner(settings, model=model))
    seqs = [engine.add_request(ids, greedy) for ids in prompts]
    for _ in engine.run():
        pass
    model.layers = package_layers
    return [seq.output_ids for seq in seqs]

package, own = tokens_with(package_layers, prompts), tokens_with(map(MyLayer, package_layers), prompts)
for theirs, ours in zip(package, own):
    print("equal" if theirs == ours else "DIFFERENT", repr(tokenizer.decode(ours)))

# %% [markdown] id="key-insight"
# > **Key insight.** A decoder is one stream per token and a sum of small additions. Only attention looks sideways, and only
# > back; *how far* back, it knows through an angle. What an engine does (chunks, blocks, ragged batches) is allowed because
# > all else treats each token alone, and no token depends on a later one.
#
# <!-- zh -->
# > **关键洞察** decoder 就是每个 token 一条流,不断往上加小东西。只有 attention 会看别人,而且只看前面的;隔了多远,它只认角度。引擎能分 chunk、分块、变长拼批,靠的就是:其余操作都只看自己这一个 token,而且谁也不依赖后面的 token。

# %% [markdown] id="off-intro"
# ## 6 · Off by one, and fluent
#
# A classic: the position of a decoded token is taken as `len(seq)` in place of `len(seq) - 1`. The prompt is right; from the
# first generated token on, everyone stands one place too far. (nano-vllm shipped exactly this: pull request 67, opened in July 2025, answered in August.)
#
# **Predict:** garbage, or text?
#
# <!-- zh -->
# ## 6 · 差一位,照样通顺
#
# 经典 bug:decode 的 token 的位置写成了 `len(seq)`,应该是 `len(seq) - 1`。prompt 没问题;从第一个生成的 token 起,位置全都多了 1。(nano-vllm 就这样发布过:67 号 PR,2025 年 7 月有人指出,8 月底才有回应。)
#
# **先预测**:输出是乱码,还是文章?

# %% id="off"
water = prompts[0]

class OffByOne(MyLayer):
    def positions(self, ctx):
        return ctx.positions + (ctx.positions >= len(water))

(wrong,) = tokens_with(map(OffByOne, package_layers), [water])
print("right:     ", repr(tokenizer.decode(package[0])))
print("off by one:", repr(tokenizer.decode(wrong)))

# %% id="off-logits" tags=["varies"]
from nanoengine.model.decoder import full_forward

full = water + package[0]

def teacher_forced(positions):
    class Elsewhere(MyLayer):
        def positions(self, ctx):
            return positions

    model.layers = torch.nn.ModuleList(map(Elsewhere, package_layers))
    logits = full_forward(model, full)
    model.layers = package_layers
    return logits

right = torch.arange(len(full))
for name, shifted in {"everyone + 1000": right + 1000, "decoded + 1": right + (right >= len(water))}.items():
    error = (teacher_forced(shifted) - teacher_forced(right)).abs().max()
    print(f"{name:16} largest difference of a logit {error:.1e}")

# %% [markdown] id="off-read"
# Fluent, and wrong. Water boils at a thousand degrees, in good English. The logits say it at once: a difference more than ten
# thousand times what rounding leaves, while moving *everyone* by 1000 stays within the rounding of the angles.
#
# So: read logits, not text. A language model mends broken input; that is its trade. A test that only asks
# whether the text reads well passes with this bug, and so does one that compares a prompt's logits.
#
# <!-- zh -->
# 通顺,而且错。水在一千度烧开,英语一点毛病没有。logits 一看便知:差得比舍入误差大一万倍还多;而**所有人**挪 1000 位,差的只是角度的舍入。
#
# 所以看 logits,别看文本。语言模型的本行就是把破烂的输入圆回来。只看文本通不通顺的测试,带着这个 bug 也能过;只比 prompt 的 logits,也能过。

# %% [markdown] id="ledger-intro"
# ## 7 · The ledger
#
# Parameters by part, and FLOPs a token: 2 for each weight that is multiplied, and 4 × heads × head size × layers for each
# token that attention looks at (2 for q · k, 2 for adding its v). **Predict** where most parameters are: attention, MLP or vocabulary?
#
# <!-- zh -->
# ## 7 · 算笔账
#
# 参数按部分数;每个 token 的 FLOP:每个参与乘法的权重算 2,attention 每多看一个 token 再加 4 × 头数 × head_dim × 层数(q · k 算 2,把 v 加进来算 2)。**先预测**:参数最多的是 attention、MLP,还是词表?

# %% id="ledger"
import math

from nanoengine.loader.weights import expected_tensors

def by_part(c):
    count = dict.fromkeys(("vocabulary", "q, o", "k, v", "mlp", "norms"), 0)
    for name, shape in expected_tensors(c).items():
        part = ("norms" if "norm" in name else "mlp" if ".mlp." in name
                else "k, v" if ".k_" in name or ".v_" in name
                else "q, o" if "self_attn" in name else "vocabulary")
        count[part] += math.prod(shape)
    return count

for name in ("smollm2-135m", "qwen3-0.6b", "qwen3-8b"):
    parts_of = by_part(NAMED_CONFIGS[name])
    total = sum(parts_of.values())
    print(f"{name:13} {total / 1e6:6.0f} M: " + ", ".join(f"{k} {v / total:.1%}" for k, v in parts_of.items()))

# %% id="flops"
def flops(c, context):
    """(products with weights, attention) of one token that sees `context` tokens."""
    matrices = c.num_parameters() - by_part(c)["norms"]
    matrices -= 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size  # the look-up multiplies nothing
    return 2 * matrices, 4 * c.num_attention_heads * c.head_dim * c.num_hidden_layers * context

even = {}
for name in ("smollm2-135m", "qwen3-0.6b", "qwen3-8b"):
    c = NAMED_CONFIGS[name]
    fixed, at_1k = flops(c, 1024)
    even[name] = fixed // (at_1k // 1024)
    print(f"{name:13} {fixed / 1e9:6.2f} GFLOP a token, attention at context 1024 adds {at_1k / fixed:.0%}, "
          f"equal at {even[name]:,} tokens")

# %% id="gqa-ledger"
for name in ("smollm2-135m", "qwen3-0.6b", "qwen3-8b"):
    c = NAMED_CONFIGS[name]
    mha = dataclasses.replace(c, num_key_value_heads=c.num_attention_heads)
    kv, kv_mha = c.kv_bytes_per_token(2), mha.kv_bytes_per_token(2)
    w, w_mha = c.num_parameters(), mha.num_parameters()
    print(f"{name:13} KV a token {kv_mha / 1024:5.1f} -> {kv / 1024:5.1f} KiB ({kv_mha / kv:.0f}x), weights "
          f"{w_mha / 1e6:.0f} -> {w / 1e6:.0f} M ({1 - w / w_mha:.0%} less), scores: the same")

# %% [markdown] id="ledger-read"
# These models are mostly MLP and vocabulary. So GQA takes only a tenth off the *weights*; what it shrinks is the *cache*: by 3, 2
# and 4 here, heads ÷ KV heads.
#
# And attention's arithmetic, "quadratic": in Qwen3-8B a token must look at {{ even['qwen3-8b']:,}} others before it weighs as much as
# the products with weights. (For a whole prompt, twice that length: its tokens see half of it on average.)
#
# <!-- zh -->
# 这几个模型的参数主要是 MLP 和词表。所以 GQA 只给**权重**减掉一成,真正缩小的是**缓存**:这里分别是 3、2、4 倍,就是「头数 ÷ KV 头数」。
#
# 而「平方级」的 attention 计算,在 Qwen3-8B 上,一个 token 要看 {{ even['qwen3-8b']:,}} 个 token,才和权重那部分一样多。(整段 prompt 得是两倍长:里面的 token 平均只看到一半。)

# %% [markdown] id="misconception"
# > **Common misconception.** "GQA makes attention cheaper to compute."
# >
# > Every query head still scores every key. What shrinks is what has to be *kept* and *read*: the KV cache and the two small
# > projections. That decode becomes faster is due to bytes, not FLOPs.
#
# <!-- zh -->
# > **常见误解** 「GQA 让 attention 算得更少。」
# >
# > 每个 query head 还是要和每个 key 算分数。变小的是要**存**、要**读**的:KV cache,还有那两个小投影。decode 变快,是因为字节少了,不是 FLOP 少了。

# %% [markdown] id="elsewhere"
# ## 8 · What vLLM and nano-vllm do here
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` |
# | --- | --- | --- |
# | the layer | `Qwen3Attention.forward`: the same order | `Qwen3Attention.forward`: QK-norm by head, then RoPE |
# | packed q, k, v | `QKVParallelLinear`: KV heads must divide evenly among the GPUs | `QKVParallelLinear`: with more GPUs than KV heads, these are stored several times |
# | rows of logits | last row of each sequence | last row of each request, also of an unfinished chunk (that sample is thrown away); and rows of drafts |
#
# <!-- zh -->
# ## 8 · vLLM 和 nano-vllm 在这里怎么做
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` |
# | --- | --- | --- |
# | 一层 | `Qwen3Attention.forward`:顺序一样 | `Qwen3Attention.forward`:先按头做 QK-norm,再 RoPE |
# | q、k、v 打包 | `QKVParallelLinear`:要求 KV head 能平分到各张卡 | `QKVParallelLinear`:卡比 KV head 多时,KV head 存多份 |
# | 算哪几行 logits | 每条序列最后一行 | 每个请求最后一行,没算完的 chunk 也算(采样结果扔掉);外加草稿的行 |

# %% [markdown] id="recall-intro"
# ## A · Whiteboard, three minutes
#
# Close this page. One decoder layer from stream to stream, with the shapes for 9 query and 3 KV heads of 64.
#
# <!-- zh -->
# ## A · 白板复述,3 分钟
#
# 合上这页。画一层 decoder,从流到流,标上形状:9 个 query head、3 个 KV head,head_dim 64。

# %% id="recall"
recall("02")

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
quiz("02")

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
hunt("02")

# %% [markdown] id="exercises"
# ## D · Exercises
#
# In `exercises/02_forward_pass.ipynb`, checked automatically:
#
# * **02a** move keys that are turned already to other positions, in another layout;
# * **02b** load q, k, v into one matrix, with GQA sizes and bias.
#
# <!-- zh -->
# ## D · 练习
#
# 在 `exercises/zh/02_forward_pass.ipynb` 里,自动批改:
#
# * **02a** key 已经转过了,挪到别的位置去,排法也换一种;
# * **02b** 把 q、k、v 装进一个矩阵,GQA 的尺寸和偏置都要管。

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
cards("02")

# %% id="ask" tags=["varies"]
ask("what does GQA shrink?")  # ask your own: the answer comes in the language of the question

# %% [markdown] id="next"
# **Next:** lesson 03. This forward pass computes every earlier token anew for each new one. Stop that: the KV cache.
#
# <!-- zh -->
# **下一课**:第 03 课。每生成一个 token,这次前向都把前面的全重算一遍。别再重算:KV cache。

# %% id="close" tags=["hidden"]
llm.close()
