# %% [markdown] id="title"
# # Lesson 01 · Ninety lines, one engine
#
# *The skeleton: what `generate()` does each step, and why a whole engine grows out of it.*
#
# **About 45 minutes** · no prerequisites · source walked: `nanoengine/engine/llm_engine.py`
#
# After this lesson you can
#
# 1. draw the loop **schedule → run → postprocess** on paper;
# 2. say what a step reports, and why telling two kinds of work apart by a minus sign is a code smell;
# 3. explain in one sentence why nano-vllm runs one kind of work a step and vLLM V1 does not.
#
# <!-- zh -->
# # 课程 01 · 90 行,一个推理引擎
#
# *引擎骨架:看清 `generate()` 每一步在干什么,以及整个引擎为什么都从这里长出来。*
#
# **约 45 分钟** · 前置:无 · 源码:`nanoengine/engine/llm_engine.py`
#
# 这一课结束时你会拿到
#
# 1. 能在纸上画出 **schedule → run → postprocess** 三段循环;
# 2. 能说清一步该汇报什么,以及为什么「靠正负号区分两种活」是坏味道;
# 3. 能用一句话解释:nano-vllm 为什么一步只跑一种活,而 vLLM V1 为什么不这样。

# %% id="env" tags=["varies"]
from nanoengine.notebook import ask, cards, hunt, lesson, player, quiz, recall, record, show

lesson("01", lang="en")

# %% [markdown] id="question"
# ## The question
#
# > "Walk me through how vLLM works."
#
# Most people start reciting PagedAttention. What the interviewer wants to hear is something else: **a request has come
# in. What does the engine do each step, and why is it cut that way?**
#
# This lesson does one thing: it takes the main loop apart until you can write it on a whiteboard. The file that holds
# it stays under a hundred lines; everything else in the package exists to serve those lines.
#
# <!-- zh -->
# ## 面试官的问题
#
# > 「讲讲 vLLM 的原理。」
#
# 大部分人从 PagedAttention 开始背。但面试官真正想听的是另一件事:**一个请求进来之后,引擎每一步在干什么,为什么要这样切?**
#
# 这一课只做一件事:把主循环拆到你能在白板上默写。装着这个循环的文件不到一百行,包里其余的代码,都是为了支撑这一百行。

# %% [markdown] id="naive-intro"
# ## 1 · First, a dumb version
#
# Treat the model as an ordinary function: token ids in, one row of logits (a score for every token of the vocabulary)
# per token out. The most obvious generate loop takes the last row, picks the likeliest token, appends it, and calls the
# function again.
#
# The model below is real: SmolLM2-135M-Instruct, on your machine.
#
# <!-- zh -->
# ## 1 · 先写一个「笨」的版本
#
# 把模型当成一个普通函数:token id 进去,每个 token 出来一行 logits(词表里每个 token 一个分数)。最直觉的生成循环就是:取最后一行,挑最可能的 token,接到末尾,再调一次。
#
# 下面这个模型是真的:SmolLM2-135M-Instruct,就跑在你的机器上。

# %% id="load"
from nanoengine import LLM, SamplingParams
from nanoengine.model.decoder import full_forward

# no prefix caching: later a second engine will write into the same KV pool
llm = LLM(max_model_len=1024, kv_cache_gib=0.25, enable_prefix_caching=False)
model, tokenizer = llm.engine.runner.model, llm.tokenizer
shape = llm.model_config
print(f"{shape.num_parameters():,} parameters, {shape.num_hidden_layers} layers")

# %% id="naive"
def generate_naive(prompt, max_tokens=24):
    ids = tokenizer.encode(prompt)
    for _ in range(max_tokens):
        logits = full_forward(model, ids)  # the whole prefix, every time
        ids.append(int(logits[-1].argmax()))
    return ids

prompt = "The three jobs of an operating system are"
ids = generate_naive(prompt)
print(tokenizer.decode(ids))

# %% [markdown] id="naive-predict"
# It is not wrong. But **guess before you run the next cell**: a prompt of 64 tokens, then 64 more generated. How much
# longer does the last token take than the first?
#
# <!-- zh -->
# 它没有错。不过,**先猜再运行下一格**:64 个 token 的 prompt,再生成 64 个。生成最后一个 token 的时间,是第一个的几倍?

# %% id="naive-cost" tags=["varies"]
import time

def seconds_per_token(num_known):
    ids, start = list(range(1000, 1000 + num_known)), time.perf_counter()
    full_forward(model, ids)
    return time.perf_counter() - start

seconds_per_token(64)  # warm up
for known in (64, 96, 128):
    best = min(seconds_per_token(known) for _ in range(3))
    print(f"{known:4} tokens known: {best * 1000:5.0f} ms for one new token")

# %% [markdown] id="three-problems"
# Each call brings one token, and each call is slower. Three problems:
#
# 1. **Recomputing.** The keys and values (K/V, what attention keeps of a token) of the whole prefix are computed again.
#    Keep them: that is a **KV cache**.
# 2. **One request at a time.** With a cache, a step computes one token, and the GPU mostly waits for weights to arrive. Many
#    requests must share them.
# 3. **Nobody owns the memory.** Reserve the maximum length for each, and a 100-token answer occupies the room of 4,096.
#
# <!-- zh -->
# 每次调用只多出一个 token,却一次比一次慢。三个致命问题:
#
# 1. **重复计算。** 整个前缀的 K/V(注意力要用的 key 和 value)每次都从头算。把它们留下来,就是 **KV cache**。
# 2. **一次只服务一个请求。** 有了缓存,一步只算一个 token,GPU 大部分时间在等权重搬运;要很多请求一起分摊,算力才吃得饱。
# 3. **显存没人管。** 给每个请求按最大长度预留 KV,一条 100 token 的短请求也要占 4096 的坑。

# %% id="count-work"
def work(prompt_len, new_tokens, cached):
    """(token forwards, attention pairs): a token forward is one token through all layers."""
    forwards = pairs = 0
    for known in range(prompt_len, prompt_len + new_tokens):
        first = known - 1 if cached and known > prompt_len else 0  # what is computed anew
        forwards += known - first
        pairs += sum(range(first + 1, known + 1))  # token i looks at i tokens
    return forwards, pairs

naive, cached = work(64, 512, cached=False), work(64, 512, cached=True)
for name, (forwards, pairs) in {"naive": naive, "KV cache": cached}.items():
    print(f"{name:9} {forwards:8,} token forwards   {pairs:12,} attention pairs")

# %% [markdown] id="count-read"
# Say what you count. **Token forwards** fall from O(n²) to O(n), here {{ naive[0] / cached[0]:.0f}} times fewer; **attention work** from O(n³) to
# O(n²), {{ naive[1] / cached[1]:.0f}} times fewer. "KV cache makes it linear" is true of the first only. (More in lesson 03.)
#
# The third problem? The vLLM paper (SOSP 2023) measured 2-4× the throughput **at the same latency**, but against
# FasterTransformer and Orca, which already cached KV; Orca even rebuilt its batch at each iteration. That gain comes from
# managing memory better. It is *not* the gain over your naive loop.
#
# <!-- zh -->
# 先说清楚数的是什么。**token 前向次数**从 O(n²) 降到 O(n),这里少了 {{ naive[0] / cached[0]:.0f}} 倍;**注意力计算量**从 O(n³) 降到 O(n²),少了 {{ naive[1] / cached[1]:.0f}} 倍。「有了 KV cache 就是线性的」只对前者成立。(第 03 课细讲。)
#
# 第三个问题值多少钱?vLLM 论文(SOSP 2023)量到:**同样的延迟下**,吞吐是别人的 2-4 倍。但对手是 FasterTransformer 和 Orca,它们早就有 KV cache,Orca 甚至已经每次迭代重新拼 batch。赢在「把显存管好」;这个倍数**不是**相对你那个笨循环的。

# %% [markdown] id="three-jobs"
# ## 2 · An engine does just three things more
#
# Three problems, three questions: the whole job of an inference engine.
#
# | question | answer | file |
# | --- | --- | --- |
# | who runs in this step? | two queues; out of blocks: **preempt** (take one's blocks, compute it again later) | `scheduler.py` |
# | where do keys and values live? | **blocks** of a few **slots**, one a token; reference counts, prefix hashes | `block_manager.py` |
# | how do many requests share one forward pass? | one **ragged** batch: unequal rows, end to end; slot mapping | `batch.py`, `model_runner.py` |
#
# <!-- zh -->
# ## 2 · 引擎只多做三件事
#
# 把三个问题反过来看,就是一个推理引擎的全部职责:
#
# | 要回答的问题 | 答案 | 文件 |
# | --- | --- | --- |
# | 这一步让谁上? | 两个队列;块不够就**抢占**:收回一个请求的块,以后重算 | `scheduler.py` |
# | 算出来的 K/V 存在哪? | **块**,每块几个**槽**,一个 token 一个槽;引用计数、前缀哈希 | `block_manager.py` |
# | 多个请求怎么缝进一次前向? | **变长拼批**:长短不一的行首尾相接;槽映射 | `batch.py`、`model_runner.py` |

# %% id="line-counts"
from pathlib import Path

import nanoengine

folder = Path(nanoengine.__file__).parent / "engine"
names = ["llm_engine", "scheduler", "block_manager", "batch", "postprocess", "rows"]
lines = {name: len((folder / f"{name}.py").read_text().splitlines()) for name in names}
for name, count in lines.items():
    print(f"{name + '.py':18} {count:4} lines")

# %% [markdown] id="source-intro"
# ## 3 · Open the source
#
# `llm_engine.py` has {{ lines['llm_engine']}} lines, and a test keeps it under 100. (All of nano-vllm, which this course measures itself
# against, has 1,385 at commit `bb823b3`.) Note what is missing: **the model** (`nanoengine/model/`). The engine needs to know
# how many sequences are in the batch, how long each one is, and to which slot each new key and value goes.
#
# The next cell reads the file that runs; nothing is pasted. Find the three numbered comments.
#
# <!-- zh -->
# ## 3 · 打开源码
#
# `llm_engine.py` 一共 {{ lines['llm_engine']}} 行,有测试盯着不许超过 100。(本课程拿来对照的 nano-vllm,全部加起来在 `bb823b3` 这个提交上是 1385 行。)注意这里少了谁:**模型本身**(在 `nanoengine/model/`)。引擎只关心这个 batch 里有几条序列、每条多长、每个新的 K/V 该写进哪个槽。
#
# 下面的代码是从正在运行的文件里现读的,不是贴上来的。先找到那三个带编号的注释。

# %% id="show-step"
from nanoengine.engine.llm_engine import LLMEngine

show(LLMEngine.step)

# %% [markdown] id="step-walk"
# **① `schedule()`** decides who runs and how many tokens each computes; blocks are allocated here.
#
# **② `launch()`** starts the forward pass **and the sampling**, and returns a *pending* result. On a GPU it returns at
# once: the work has only been queued.
#
# **③ `_land()`** asks for the result and does the bookkeeping: append, find the end, free.
#
# Between ② and ③ nothing forces the engine to wait. With `overlap=1` it launches the next step first: one step is then
# **in flight**, launched and not yet landed.
#
# <!-- zh -->
# **① `schedule()`**:决定谁上、每条算几个 token,块也在这里分配。
#
# **② `launch()`**:发起前向,**采样也在这里面**,返回一个「待取」的结果。在 GPU 上它立刻返回:活只是排进了队列。
#
# **③ `_land()`**:取结果,记账:追加 token、判断结束、归还块。
#
# ② 和 ③ 之间并不是非等不可。设 `overlap=1`,引擎会先把下一步发出去,这时就有一步**在飞**(in flight):已经发出,结果还没取。

# %% [markdown] id="step-robust"
# The other lines, in order:
#
# * `must_land_first`, `needs_history`: a preemption or a penalty needs the token in flight → land it first;
# * `build_batch` gives each sequence a row: there, on the device, the next batch finds tokens still in flight;
# * `advance`: what was launched counts as computed;
# * nothing to run and nothing in flight: the scheduler is broken → an error, not an endless loop;
# * an exception (out of memory, Ctrl-C) → running requests keep their tokens and are computed again; none is lost.
#
# <!-- zh -->
# 其余几行,按顺序看:
#
# * `must_land_first`、`needs_history`:要抢占,或者带惩罚项,都得先知道在飞的 token → 先收回那一步;
# * `build_batch` 给每条序列分一行:还在飞的 token 就在设备上的那一行,下一批去那里取;
# * `advance`:发出去的就记成「已算」;
# * 没有可跑的,也没有在飞的:调度器有 bug → 直接报错,绝不空转;
# * 抛异常(显存不够、Ctrl-C)→ 在跑的请求保留 token、重算 KV,一个都不丢。

# %% id="show-run"
show(LLMEngine.run)

# %% [markdown] id="run-read"
# And that is the engine: **steps until nobody is left.**
#
# ```text
#  ┌─→ ① schedule ──→ ② run ──→ ③ postprocess ──┐
#  └──────────────────────────────────────────────┘
#  each request:  waiting → running → finished
# ```
#
# `LLM.generate()` is this loop plus a tokenizer and a progress bar.
#
# <!-- zh -->
# 引擎就是这样:**一步接一步,跑到没有请求为止。**
#
# ```text
#  ┌─→ ① schedule ──→ ② run ──→ ③ postprocess ──┐
#  └──────────────────────────────────────────────┘
#  each request:  waiting → running → finished
# ```
#
# `LLM.generate()` 不过是这个循环加上分词器和进度条。

# %% [markdown] id="yours-intro"
# ## 4 · Your version
#
# The same step, built from the real parts, without the safety net. It plugs into the package: `LLMEngine` keeps the
# queues, the block manager and the runner; only `step` is yours. Run it. Then delete a line (`advance`, say, or `retire`)
# and see what the check says.
#
# <!-- zh -->
# ## 4 · 你来写一遍
#
# 还是那个 step,用真零件拼,只是去掉了安全网。它直接插进包里:队列、块管理器、runner 都还是 `LLMEngine` 的,只有 `step` 是你的。先跑通,再随便删一行(比如 `advance` 或 `retire`),看下面的检查怎么说。

# %% id="my-engine"
from nanoengine.engine.batch import build_batch
from nanoengine.engine.postprocess import InFlight, land

class MyEngine(LLMEngine):
    def step(self):
        plan = self.scheduler.schedule()                               # 1. who runs
        batch = build_batch(plan.seqs, self.block_manager.block_size)
        pending = self.runner.launch(batch)                            # 2. run, and sample
        self.scheduler.advance(plan)
        output = land(InFlight(plan, batch, pending), self.block_manager)  # 3. write back
        for seq in output.finished:
            del self.sequences[seq.seq_id]
        self.scheduler.retire(output.finished)
        return output

# %% [markdown] id="slot-runner"
# How do we know that it is right? First on a runner without a model. `SlotRunner` keeps a number in each KV slot and
# makes the next token a **hash of everything it gathers through the block table**. One wrong slot, one stale block, and
# the output is different. `expected_output` knows the right answer from the tokens alone.
#
# Then the same class with the real model: your dozen lines against the package, token by token.
#
# <!-- zh -->
# 怎么知道写对了?先用一个没有模型的 runner。`SlotRunner` 在每个 KV 槽里存一个数,再把**顺着块表读到的全部内容做一次哈希**,当作下一个 token。写错一个槽、读到一个过期的块,输出就变了。而 `expected_output` 只看 token 就知道正确答案。
#
# 然后还是这个类,换上真模型:你这十来行,对上整个包,逐 token 比较。

# %% id="my-engine-check"
from itertools import islice

from nanoengine.course.example import REQUESTS, example_engine
from nanoengine.sim import expected_output

mine = example_engine(engine_class=MyEngine)
seqs = list(mine.sequences.values())
steps = sum(1 for _ in islice(mine.run(), 100))  # a broken step might never end
for (letter, (tokens, new)), seq in zip(REQUESTS.items(), seqs):
    verdict = "equal the oracle" if seq.output_ids == expected_output(tokens, new) else "WRONG"
    print(f"{letter}: {new:2} tokens {verdict}, preempted {seq.num_preemptions}×")
pool = mine.block_manager
print(f"{steps} steps, {pool.num_free_blocks} of {pool.num_blocks} blocks free at the end")

# %% id="my-engine-real"
prompts = ["The capital of France is", "Water boils at", "def fibonacci(n):"]
greedy = SamplingParams(temperature=0, max_tokens=16)
theirs = llm.generate(prompts, greedy, use_tqdm=False)

mine = MyEngine(llm.config, runner=llm.engine.runner)
seqs = [mine.add_request(tokenizer.encode(p), greedy) for p in prompts]
for _ in islice(mine.run(), 100):
    pass
for out, seq in zip(theirs, seqs):
    verdict = "equal" if out.token_ids == seq.output_ids else "DIFFERENT"
    print(verdict, repr(tokenizer.decode(seq.output_ids)))

# %% [markdown] id="key-insight"
# > **Key insight.** An engine's first job is not to make the model faster, but to decide **which requests run together in
# > each step**. A step reads the weights once, however many requests share it. How full it is, the engine decides.
#
# <!-- zh -->
# > **关键洞察** 引擎的首要任务不是「把模型跑得更快」,而是**决定每一步让哪些请求一起跑**。一步里不管有几个请求,权重都只读一遍;这一步装得满不满,由引擎决定。

# %% [markdown] id="example-intro"
# ## 5 · Watch it: four requests, twelve blocks
#
# Requests **A, B, C, D** have prompts of 10, 6, 14 and 20 tokens and ask for 12, 12, 6 and 6 more. Blocks of 4 tokens, 12
# blocks, at most 16 tokens a step. A and C begin with the same 8 tokens. All arrive at once.
#
# Computing a prompt is **prefill**; after it, a request computes one token a step: **decode**.
#
# **Predict:** in the second step (step 1, we count from 0), who computes how many tokens? Then look.
#
# <!-- zh -->
# ## 5 · 看它跑:四个请求,十二个块
#
# 请求 **A、B、C、D** 的 prompt 分别是 10、6、14、20 个 token,各要再生成 12、12、6、6 个。块大小 4,共 12 块,每步最多算 16 个 token。A 和 C 开头的 8 个 token 一样。四个请求同时到。
#
# 算 prompt 叫 **prefill**;之后每步算一个 token,叫 **decode**。
#
# **先预测**:第 1 步(从 0 数起,也就是第二步),谁算几个 token?想好再看。

# %% id="example-run"
engine = example_engine("token_budget")
with record(engine) as trace:
    for _ in engine.run():
        pass
player(trace)

# %% [markdown] id="example-read"
# Three moments to find with the jump buttons:
#
# * **step 1**: A 1, B 1, C 6, D 8. One batch, both kinds, exactly 16 tokens. C skips the 8 tokens that it shares with A:
#   their KV is in the **prefix cache**. D gets blocks for its whole prompt, computed in two **chunks**, 8 and 12.
# * **step 3**: no block is left. The last one in, D, gives all its blocks back and waits.
# * **step 12**: D starts over. Its tokens were kept; only their KV is computed again.
#
# <!-- zh -->
# 用跳转按钮找到三个时刻:
#
# * **第 1 步**:A 1 个、B 1 个、C 6 个、D 8 个。一个 batch 两种活,不多不少 16 个 token。C 和 A 相同的 8 个不用算:它们的 KV 在**前缀缓存**里。D 一次拿齐整段 prompt 的块,分 8 和 12 两个 **chunk** 来算。
# * **第 3 步**:一个空闲块都没有了。最晚进来的 D 交出全部块,回去排队。
# * **第 12 步**:D 从头再算。token 都留着,重算的只是 KV。

# %% [markdown] id="compare-intro"
# ## 6 · Two policies, one state
#
# Left, `prefill_first`, nano-vllm's way: a step is all prefill or all decode, and prefill goes first. Right,
# `token_budget`, vLLM V1's way: one budget, no phases.
#
# **Predict:** which one needs fewer steps for A-D? Which one lets A wait between two of its tokens?
#
# <!-- zh -->
# ## 6 · 两种策略,同一套状态
#
# 左边 `prefill_first` 是 nano-vllm 的做法:一步要么全是 prefill,要么全是 decode,prefill 优先。右边 `token_budget` 是 vLLM V1 的做法:只有一个 token 预算,不分阶段。
#
# **先预测**:跑完 A-D,谁的步数少?谁会让 A 在两个 token 之间干等?

# %% id="compare-run"
engine = example_engine("prefill_first")
with record(engine) as one_kind:
    for _ in engine.run():
        pass
player(one_kind, compare=trace, labels=("prefill_first", "token_budget"))

# %% [markdown] id="reports-intro"
# ## 7 · What a step reports
#
# Beside the finished sequences, nano-vllm's `step()` returns one number: tokens if the step was a prefill, *minus* the
# number of sequences if it was a decode. `generate()` looks at the sign to keep two throughputs apart.
#
# Our `step()` returns a record with two named counts. Which step could one signed number not report?
#
# <!-- zh -->
# ## 7 · 一步该汇报什么
#
# 除了已经结束的序列,nano-vllm 的 `step()` 只返回一个数:prefill 步是 token 数,decode 步是**负的**序列数。`generate()` 靠正负号把两种吞吐分开统计。
#
# 我们的 `step()` 返回一条记录,两个计数各有名字。看看哪一步是一个带符号的数表达不了的:

# %% id="reports"
def counts(engine):
    return [(out.num_prefill_tokens, out.num_decode_tokens) for out in engine.run()]

for policy in ("prefill_first", "token_budget"):
    reports = counts(example_engine(policy))
    print(f"{policy:14} {len(reports)} steps, (prefill tokens, decode tokens): {reports[:6]} …")

# %% [markdown] id="reports-read"
# Your prediction: 18 steps against 20, and under `prefill_first` A gets nothing in steps 1 and 2.
#
# Under `token_budget`, step 1 is (14, 2): **both at once**. A sign has room for only one kind, so the trick fails the day
# you mix. That is why it is a smell: the number carries a quantity *and* a type, and the reader has to know the code.
#
# (The prefill count is of tokens that were *computed*: what came from the cache does not count.)
#
# <!-- zh -->
# 对一下刚才的预测:18 步对 20 步;`prefill_first` 下,A 在第 1、2 步干等。
#
# `token_budget` 的第 1 步是 (14, 2):**两种同时有**。一个正负号只放得下一种,所以哪天开始混跑,这个小把戏当天就失效。这就是坏味道所在:一个数既装「量」又装「类型」,不读源码就看不懂。
#
# (prefill 计的是**真正算了**的 token,从缓存来的不算。)

# %% [markdown] id="kinds"
# ## 8 · Why would a step be of one kind?
#
# | | prefill | decode |
# | --- | --- | --- |
# | tokens a sequence | the whole prompt, or a chunk | 1 |
# | usually bound by | compute: large matrix products | memory: weights **and** KV are read for one token |
# | KV written | a long run of slots | one slot |
# | nano-vllm calls (flash-attn) | `flash_attn_varlen_func` | `flash_attn_with_kvcache` |
#
# <!-- zh -->
# ## 8 · 为什么一步只跑一种?
#
# | | prefill | decode |
# | --- | --- | --- |
# | 每条序列几个 token | 整段 prompt,或一个 chunk | 1 个 |
# | 通常的瓶颈 | 算力:大矩阵乘 | 带宽:为一个 token 读一遍权重**和** KV |
# | 写 KV | 一大片槽 | 1 个槽 |
# | nano-vllm 调用(flash-attn) | `flash_attn_varlen_func` | `flash_attn_with_kvcache` |

# %% [markdown] id="kinds-why"
# People say that mixing makes the optimisations fight. It is not so. nano-vllm keeps the kinds apart for two plain reasons:
# it calls **two different attention functions**, and its **CUDA graphs** (recorded kernels, replayed by one call) exist
# only for decode. vLLM V1 mixes because it helps: decode tokens ride along in a step whose weights are read anyway.
#
# What does keeping apart cost? Let A generate; every second step another 12-token prompt arrives. Count the steps in which
# A, though running, gets nothing.
#
# <!-- zh -->
# 常听人说「混着跑,两种优化会打架」。不是这么回事。nano-vllm 分开跑,理由很朴素:它调的是**两个不同的注意力函数**,而且 **CUDA Graph**(把一串内核录下来,一次调用重放)只为 decode 录了。vLLM V1 混跑,是因为划算:反正这一步要读一遍权重,decode 的 token 搭个便车。
#
# 分开跑的代价是什么?让 A 先生成着,每隔一步来一条 12 token 的新 prompt。数一数:A 明明在 running 里,却有几步什么都没拿到。

# %% id="stall"
from nanoengine import EngineConfig
from nanoengine.sim import SlotRunner

def longest_wait(policy, arrivals=10):
    config = EngineConfig(policy=policy, max_num_batched_tokens=16)
    engine = LLMEngine(config, runner=SlotRunner(400, 4))
    a = engine.add_request(range(10), SamplingParams(max_tokens=40))
    waits, wait = [], 0
    for step in range(30):
        if step % 2 and step < 2 * arrivals:
            engine.add_request([1000 + step] * 12, SamplingParams(max_tokens=20))
        out = engine.step()
        wait = 0 if a in out.seqs else wait + 1
        waits.append(wait)
    return sum(w > 0 for w in waits), max(waits)

for policy in ("prefill_first", "token_budget"):
    steps, in_a_row = longest_wait(policy)
    print(f"{policy:14} A got nothing in {steps} of 30 steps, at most {in_a_row} in a row")

# %% [markdown] id="stall-read"
# Under `prefill_first` every arrival stops everyone who is decoding. With an arrival in *each* step, nobody would decode
# until places or blocks ran out (lesson 07 shows it). `token_budget` gives running sequences their
# token first, and newcomers get what is left.
#
# <!-- zh -->
# `prefill_first` 下,每来一个新请求,所有正在 decode 的都得停一步。要是**每步**都有新请求,decode 就一直轮不上,直到名额或者块用完(第 07 课演示)。`token_budget` 先给在跑的,剩下的预算才轮到新来的。

# %% [markdown] id="ledger-intro"
# ## 9 · The ledger: why KV memory rules everything
#
# The numbers of Qwen3-0.6B: 28 layers, 8 KV heads (16 query heads share them), head dimension 128, bf16. Change
# the card and run it again.
#
# <!-- zh -->
# ## 9 · 算笔账:KV 显存为什么说了算
#
# Qwen3-0.6B:28 层,8 个 KV head(16 个 query head 共用),head_dim 128,bf16。换一张卡,再跑一遍。

# %% id="ledger"
from nanoengine.model.config import NAMED_CONFIGS

qwen = NAMED_CONFIGS["qwen3-0.6b"]
gpu_bytes, utilization, block_size, max_len = 12e9, 0.9, 256, 4096  # try 24e9, or 12 * 2**30
token = qwen.kv_bytes_per_token(2)                # K and V, all layers, 2 bytes each
weights = qwen.num_parameters() * 2
blocks = int((gpu_bytes * utilization - weights) // (token * block_size))
print(f"KV of one token        {token / 2**10:8.0f} KiB")
print(f"KV of one block        {token * block_size / 2**20:8.0f} MiB   ({block_size} tokens)")
print(f"KV of a full sequence  {token * max_len / 2**20:8.0f} MiB   ({max_len} tokens)")
print(f"weights                {weights / 1e9:8.3f} GB")
room = blocks * block_size
print(f"blocks that fit        {blocks:8}       = {room:,} tokens = {room / max_len:.1f} full sequences")

# %% [markdown] id="ledger-read"
# {{ blocks }} blocks ≈ {{ blocks * block_size / 1000:.0f}} thousand tokens ≈ {{ blocks * block_size // max_len }} sequences of full length. nano-vllm's
# `max_num_seqs` is 512 by default; it bounds a **batch**, not the queue. What memory can hold is another limit, and
# it depends on how long the sequences are. In each step the scheduler has to stay within both.
#
# You may hear "about 340 blocks" for such a card. It depends on what you call 12 GB, and on how you round the weights.
# Always write the units.
#
# <!-- zh -->
# {{ blocks }} 个 block ≈ {{ blocks * block_size / 10000:.1f}} 万个 token ≈ {{ blocks * block_size // max_len }} 条满长度序列。nano-vllm 的 `max_num_seqs` 默认 512,它限制的是一个 **batch** 里的序列数,不是队列长度;显存能装几条是另一个上限,要看序列实际多长。调度器每一步都得同时守住这两个上限。
#
# 你可能听过「大约 340 个 block」。其实要看 12 GB 按哪种单位算、权重怎么舍入。算账先写单位。

# %% id="units"
def count(gpu, weights):
    return int((gpu * 0.9 - weights) // (token * 256))

print("12 GB  = 12e9,     weights 1.2 GB  :", count(12e9, 1.2e9))
print("12 GB  = 12e9,     weights 1.192 GB:", count(12e9, weights))
print("12 GiB = 12 * 2**30 (what cards have):", count(12 * 2**30, weights))
print("... and all of these before activations, CUDA context and graphs")

# %% [markdown] id="misconception"
# > **Common misconception.** "The larger the batch, the higher the throughput."
# >
# > A decode step reads all weights once, **plus the KV of every sequence in the batch**. While weights dominate, more
# > sequences are nearly free. Once KV dominates, each new sequence brings its own bytes: throughput saturates.
#
# <!-- zh -->
# > **常见误解** 「batch 越大,吞吐越高。」
# >
# > 一步 decode 要读一遍全部权重,**再加上 batch 里每条序列的 KV**。权重占大头时,多加几条几乎不要钱;等 KV 占了大头,每多一条就多一份字节:吞吐越涨越慢,趋于饱和。

# %% id="saturation"
def ideal_tokens_per_second(batch, context, bandwidth=4.8e12):  # H200, datasheet
    per_sequence = (context + 1) * token + 0.91e6  # KV; logits and activations
    bytes_read = weights + batch * per_sequence
    return batch / (bytes_read / bandwidth)

for batch in (1, 16, 64, 256, 1024, 4096):
    kv, most = batch * 513 * token, ideal_tokens_per_second(batch, 512)
    share = kv / (kv + weights)
    print(f"batch {batch:5}: at most {most / 1000:5.1f}k tokens/s, KV is {share:4.0%} of the bytes")

# %% [markdown] id="saturation-read"
# At context 512 an H200 can reach {{ ideal_tokens_per_second(64, 512) / 1000:.0f}}k tokens/s with batch 64,
# {{ ideal_tokens_per_second(256, 512) / 1000:.0f}}k with 256, and never more than
# {{ ideal_tokens_per_second(10**9, 512) / 1000:.0f}}k. Four times the batch, {{ ideal_tokens_per_second(256, 512) / ideal_tokens_per_second(64, 512):.2f}} times the
# throughput. The turning point is where KV weighs as much as the weights: batch × context ≈
# {{ weights // token:,}} tokens for this model.
#
# (The last row is arithmetic only: the KV of 4,096 sequences is {{ 4096 * 513 * token / 1e9:.0f}} GB, and the card has 141.)
#
# <!-- zh -->
# 上下文 512 时,H200 的上限:batch 64 是 {{ ideal_tokens_per_second(64, 512) / 1000:.0f}}k token/s,batch 256 是 {{ ideal_tokens_per_second(256, 512) / 1000:.0f}}k,再大也过不了 {{ ideal_tokens_per_second(10**9, 512) / 1000:.0f}}k。batch 翻四倍,吞吐只有 {{ ideal_tokens_per_second(256, 512) / ideal_tokens_per_second(64, 512):.2f}} 倍。拐点在 KV 和权重一样重的地方:这个模型大约是 batch × 上下文 ≈ {{ weights // token:,}} 个 token。
#
# (最后一行只是算术:4096 条序列的 KV 要 {{ 4096 * 513 * token / 1e9:.0f}} GB,而这张卡只有 141 GB。)

# %% [markdown] id="negative-intro"
# ## 10 · Where an engine does not help
#
# Batching buys throughput. Does it also make *your* request faster? **Predict**, then measure on this machine: one
# request alone, then the same request among eight.
#
# <!-- zh -->
# ## 10 · 引擎帮不上忙的地方
#
# 拼批买到的是吞吐。那**你的**那一个请求会更快吗?**先预测**,再在这台机器上量:单独跑一个,然后混在八个里跑。

# %% id="negative" tags=["varies"]
def measure(num_requests, new_tokens=16):
    prompts = [[7 * i + j for j in range(100, 116)] for i in range(num_requests)]
    start = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start

for n in (1, 8):
    seconds = min(measure(n) for _ in range(2))
    print(f"{n} request(s): {n * 16 / seconds:5.1f} tokens/s in all, {16 / seconds:5.1f} for each")

# %% [markdown] id="negative-read"
# In all: more. For each: **less**. An engine trades one user's speed for everyone's throughput. If you only ever serve one
# stream, batching buys you nothing; there, kernels and CUDA graphs matter (lessons 10 and 12).
#
# <!-- zh -->
# 总量:多了。每一个:**慢了**。引擎是拿单个用户的速度换所有人的吞吐。如果你永远只服务一路请求,拼批就帮不上忙,那时要看内核和 CUDA Graph(第 10、12 课)。

# %% [markdown] id="elsewhere-read"
# ## 11 · What vLLM and nano-vllm do here
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` |
# | --- | --- | --- |
# | the loop | `LLMEngine.step`, `LLMEngine.generate` | `EngineCore.step` |
# | who runs | `Scheduler.schedule`: prefill, else decode | `Scheduler.schedule`: one budget, no phases |
# | forward, sampling | `ModelRunner.run` | `GPUModelRunner.execute_model`, then `sample_tokens` |
# | write back | `Scheduler.postprocess` | `Scheduler.update_from_output` |
#
# Often told wrongly: V1 has **one** scheduler and one budget, not one for prefill and one for decode. And the runner
# samples, as part of its step; postprocess only writes down what was sampled, perhaps a step later.
#
# <!-- zh -->
# ## 11 · vLLM 和 nano-vllm 在这里怎么做
#
# | | nano-vllm `bb823b3` | vLLM `v0.24.0` |
# | --- | --- | --- |
# | 主循环 | `LLMEngine.step`、`LLMEngine.generate` | `EngineCore.step` |
# | 谁上 | `Scheduler.schedule`:先 prefill,否则 decode | `Scheduler.schedule`:一个预算,没有阶段 |
# | 前向与采样 | `ModelRunner.run` | `GPUModelRunner.execute_model`,然后 `sample_tokens` |
# | 写回 | `Scheduler.postprocess` | `Scheduler.update_from_output` |
#
# 两处常被讲错。V1 只有**一个**调度器、一个预算,没有拆成 prefill 和 decode 两个。采样是 runner 那一步的事;postprocess 只把采到的 token 记下来,而且可以晚一步再记。

# %% [markdown] id="recall-intro"
# ## A · Whiteboard, three minutes
#
# Close this page. On paper: the states a request passes through, the three stages of the loop, and one thing that matters
# in each. Then unfold and grade yourself.
#
# <!-- zh -->
# ## A · 白板复述,3 分钟
#
# 合上这页。在纸上画出:一个请求要经过哪些状态、循环分哪三段、每一段里最关键的一件事。画完再展开对照。

# %% id="recall"
recall("01")

# %% [markdown] id="quiz-intro"
# ## B · Closed-book quiz
#
# Five questions; go on with four right. A wrong answer is useful: it tells you what to read again.
#
# <!-- zh -->
# ## B · 闭卷测验
#
# 五道题,答对四道再往下走。答错不要紧,错的那道正好告诉你该回看哪里。

# %% id="quiz"
quiz("01")

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
hunt("01")

# %% [markdown] id="exercises"
# ## D · Exercises
#
# In `exercises/01_ninety_lines.ipynb`, checked automatically:
#
# * **01a** write `step()` with one step in flight;
# * **01b** the KV ledger for any GPU.
#
# <!-- zh -->
# ## D · 练习
#
# 在 `exercises/zh/01_ninety_lines.ipynb` 里,自动批改:
#
# * **01a** 自己写 `step()`,要能有一步在飞;
# * **01b** 给任意一张卡算 KV 账。

# %% [markdown] id="card-intro"
# ## Interview card
#
# It comes up in almost every interview about inference. Say it aloud in 30 seconds, then compare.
#
# <!-- zh -->
# ## 面试复述卡
#
# 几乎每场推理框架面试都会出现。先出声讲 30 秒,再看参考答法。

# %% id="cards"
cards("01")

# %% [markdown] id="ask-intro"
# ## Interrupt me any time
#
# Stuck on a line, a term, or "what became of this in vLLM"? Ask. It looks through the course's own text and the source,
# and says so when it finds nothing.
#
# <!-- zh -->
# ## 随时打断我
#
# 卡在哪一行、哪个术语,或者想问「vLLM 里这段变成什么样了」,直接问。它在课程正文和源码里找,找不到会老实说找不到。

# %% id="ask" tags=["varies"]
from IPython.display import display

display(ask("why is sampling not in postprocess?"))
ask("采样为什么不在 postprocess 里?")  # either language will do

# %% [markdown] id="next"
# **Next:** lesson 02, one forward pass. What happens inside `launch()`: from weights to logits, the same as
# Hugging Face's up to rounding.
#
# <!-- zh -->
# **下一课**:第 02 课,一次前向。走进 `launch()` 里面:从权重到 logits,和 Hugging Face 的结果只差浮点舍入。

# %% id="close" tags=["hidden"]
llm.close()
