# %% [markdown] id="title"
# # Exercises 03 · Stop recomputing
#
# Two exercises, about 45 minutes. Run the next cell first; then write in the cells marked **yours** and run
# the check below each. Stuck?
# `hint("ex03a")` gives one hint after another; the same hints are folded under each task.
#
# Lesson: [03 · Stop recomputing](../lessons/03_kv_cache.ipynb)
#
# <!-- zh -->
# # 练习 03 · KV cache:别再重算
#
# 两道题,约 45 分钟。先运行下一格,再在标着 `# yours` 的格子里写,写完运行下面的检查。卡住了就运行 `hint("ex03a")`,一次给一条提示;同样的提示也折叠在每道题下面。
#
# 课程:[03 · KV cache:别再重算](../../lessons/zh/03_kv_cache.ipynb)

# %% id="env" tags=["varies"]
from nanoengine.notebook import check, hint, lesson

lesson("03", lang="en")

# %% [markdown] id="ex03a"
# ## 03a · Cached attention for any chunk
#
# The lesson's `my_attention` knows two cases: a prompt with nothing before it, and one new token. An engine has a third one: **several new
# tokens after some old ones** (a long prompt in chunks, a prefix-cache hit, draft tokens to verify). Write one function for all three.
#
# <!-- zh -->
# ## 03a · 任意 chunk 的带缓存注意力
#
# 课里的 `my_attention` 只会两种情况:前面什么都没有的 prompt,和一个新 token。引擎里还有第三种:**旧 token 后面一次来好几个新的**(长 prompt 分 chunk、前缀缓存命中、验证草稿 token)。写一个函数,三种都管。

# %% [markdown] id="ex03a-rules"
# `cached_attention(q, k, v, cache, start, scale)` → `[n, heads, head_dim]`
#
# * q `[n, heads, d]`; k, v `[n, kv_heads, d]`: the tokens at positions start … start + n − 1;
# * cache `[2, max_len, kv_heads, d]`, K then V: slots below `start` are filled, the rest holds **old rubbish**. Write k and v to
#   their slots, in place;
# * row i sees positions 0 … start + i; query head h reads KV head h // (heads / kv_heads).
#
# Torch's own functions are welcome, the package's are not.
#
# <!-- zh -->
# `cached_attention(q, k, v, cache, start, scale)` → `[n, heads, head_dim]`
#
# * q `[n, heads, d]`;k、v `[n, kv_heads, d]`:位置 start 到 start + n − 1 的 token;
# * cache `[2, max_len, kv_heads, d]`,先 K 后 V:`start` 之前的槽是满的,其余是**旧垃圾**。把 k、v 原地写进自己的槽;
# * 第 i 行看得见位置 0 到 start + i;query head h 读 KV head h // (heads / kv_heads)。
#
# torch 自带的函数随便用,包里的不行。

# %% [markdown] id="ex03a-hints"
# <!-- hints ex03a -->
#
# <!-- zh -->
# <!-- hints ex03a -->

# %% id="ex03a-answer" tags=["answer"]
import torch

# --- stub
def cached_attention(q, k, v, cache, start, scale):  # yours
    raise NotImplementedError("ex03a")
# --- solution
def cached_attention(q, k, v, cache, start, scale):
    n, group = len(q), q.shape[1] // k.shape[1]
    cache[0, start : start + n], cache[1, start : start + n] = k, v
    keys, values = cache[:, : start + n].repeat_interleave(group, dim=2)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    may_see = torch.arange(start + n) <= torch.arange(start, start + n)[:, None]
    weights = scores.masked_fill(~may_see, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)

# %% id="ex03a-check" tags=["check"]
check("ex03a", globals())

# %% [markdown] id="ex03b"
# ## 03b · The batch at which decode stops being bandwidth-bound
#
# Write `turning_batch(model, bandwidth, peak, context)`: the smallest batch at which the arithmetic of a decode step takes **at least as long**
# as its memory traffic, or `None` if there is none.
#
# <!-- zh -->
# ## 03b · batch 多大,decode 不再受带宽限制
#
# 写 `turning_batch(model, bandwidth, peak, context)`:一步 decode 的计算时间**不少于**搬运时间的最小 batch;没有就返回 `None`。

# %% [markdown] id="ex03b-rules"
# * `model` is a `ModelConfig`; `bandwidth` in bytes a second, `peak` in FLOPs a second;
# * every sequence attends to `context` tokens, its new one among them. Their KV is moved once; the weights once a step;
# * 2 bytes a number, 4 if `model.dtype` is `"float32"`;
# * each weight is used for 2 FLOPs a sequence; attention takes 4 × layers × query heads × head_dim × context more;
# * if the head is not tied (`tie_word_embeddings`), leave the embedding out: it is only looked up. Nothing else counts.
#
# Of use: `model.num_parameters()`, `model.kv_bytes_per_token(width)`; to try it: `NAMED_CONFIGS`.
#
# <!-- zh -->
# * `model` 是 `ModelConfig`;`bandwidth` 是字节每秒,`peak` 是 FLOP 每秒;
# * 每条序列看 `context` 个 token,新的那个也算在内。它们的 KV 搬一次;权重每步搬一次;
# * 每个数 2 字节;`model.dtype` 是 `"float32"` 时 4 字节;
# * 每个权重对每条序列是 2 FLOP;注意力另加 4 × 层数 × query head 数 × head_dim × context;
# * 输出头不共享(`tie_word_embeddings`)时,embedding 只是查表,不算。别的都不算。
#
# 用得上的:`model.num_parameters()`、`model.kv_bytes_per_token(width)`;想试一试,模型在 `NAMED_CONFIGS` 里。

# %% [markdown] id="ex03b-hints"
# <!-- hints ex03b -->
#
# <!-- zh -->
# <!-- hints ex03b -->

# %% id="ex03b-answer" tags=["answer"]
from nanoengine.model.config import NAMED_CONFIGS

# --- stub
def turning_batch(model, bandwidth, peak, context):  # yours
    raise NotImplementedError("ex03b")
# --- solution
def turning_batch(model, bandwidth, peak, context):
    width = 4 if model.dtype == "float32" else 2
    weights = model.num_parameters()
    if not model.tie_word_embeddings:
        weights -= model.vocab_size * model.hidden_size
    kv = context * model.kv_bytes_per_token(width)
    flops = 2 * weights + 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * context
    gain = flops * bandwidth - kv * peak  # what one more sequence adds, arithmetic less traffic
    return -(-weights * width * peak // gain) if gain > 0 else None

# %% id="ex03b-check" tags=["check"]
check("ex03b", globals())

# %% [markdown] id="next"
# Both green? In a terminal, `nanoengine course status` says what is next.
#
# <!-- zh -->
# 都绿了?在终端里运行 `nanoengine course status`,它会告诉你下一步。
