# %% [markdown] id="title"
# # Exercises 01 · Ninety lines, one engine
#
# Two exercises, about 40 minutes. Run the next cell first; then write in the cells marked **yours** and run
# the check below each. Stuck?
# `hint("ex01a")` gives one hint after another; the same hints are folded under each task.
#
# Lesson: [01 · Ninety lines, one engine](../lessons/01_ninety_lines.ipynb)
#
# <!-- zh -->
# # 练习 01 · 90 行,一个推理引擎
#
# 两道题,约 40 分钟。先运行下一格,再在标着 `# yours` 的格子里写,写完运行下面的检查。卡住了就运行 `hint("ex01a")`,一次给一条提示;同样的提示也折叠在每道题下面。
#
# 课程:[01 · 90 行,一个推理引擎](../../lessons/zh/01_ninety_lines.ipynb)

# %% id="env" tags=["varies"]
from nanoengine.notebook import check, hint, lesson

lesson("01", lang="en", torch=False)

# %% [markdown] id="ex01a"
# ## 01a · A step that does not wait
#
# `MyEngine.step()` in the lesson asks for each result at once, so the runner idles while the host prepares the next batch. Write
# `step(engine)` with **one launch in flight**: launch this batch, *then* land the one before it.
#
# <!-- zh -->
# ## 01a · 不等结果的 step
#
# 课里的 `MyEngine.step()` 一发出去就等结果,主机准备下一批的时候,runner 就闲着。写一个 `step(engine)`,让**一步在飞**:先发出这一批,**再**收上一批。

# %% [markdown] id="ex01a-rules"
# Called again and again until `engine.has_unfinished()` is False. Each call returns what **landed** in it:
#
# `{"prefill": tokens, "decode": tokens, "finished": [ids]}`, zeros and `[]` if nothing did.
#
# * launches that have not landed stand in `engine.in_flight`, oldest first, as `InFlight(plan, batch, pending)`;
# * if `engine.scheduler.must_land_first()` says so, land before you schedule;
# * an empty plan launches nothing, and lands what is still in flight;
# * use `schedule`, `engine.build_batch(plan)`, `launch`, `advance`, `land`, `retire`; not `LLMEngine.step` or `_land`.
#
# <!-- zh -->
# 它会被反复调用,直到 `engine.has_unfinished()` 为 False。每次返回这次调用里**收回来**的东西:
#
# `{"prefill": token 数, "decode": token 数, "finished": [id]}`,什么都没收就是 0、0 和 `[]`。
#
# * 发出去还没收的,放在 `engine.in_flight` 里,最早的在前,每个是 `InFlight(plan, batch, pending)`;
# * `engine.scheduler.must_land_first()` 说要先收,就先收再调度;
# * plan 为空就不发,只把还在飞的收回来;
# * 零件用 `schedule`、`engine.build_batch(plan)`、`launch`、`advance`、`land`、`retire`,不要用 `LLMEngine.step` 和 `_land`。

# %% [markdown] id="ex01a-hints"
# <!-- hints ex01a -->
#
# <!-- zh -->
# <!-- hints ex01a -->

# %% id="ex01a-answer" tags=["answer"]
from nanoengine.engine.postprocess import InFlight, land

# --- stub
def step(engine):  # yours
    raise NotImplementedError("ex01a")
# --- solution
def land_oldest(engine):
    output = land(engine.in_flight.pop(0), engine.block_manager)
    for seq in output.finished:
        del engine.sequences[seq.seq_id]
    engine.scheduler.retire(output.finished)
    return {"prefill": output.num_prefill_tokens, "decode": output.num_decode_tokens,
            "finished": [seq.seq_id for seq in output.finished]}


def step(engine):
    if engine.in_flight and engine.scheduler.must_land_first():
        return land_oldest(engine)
    plan = engine.scheduler.schedule()
    if plan.seqs:
        batch = engine.build_batch(plan)
        engine.in_flight.append(InFlight(plan, batch, engine.runner.launch(batch)))
        engine.scheduler.advance(plan)
    if len(engine.in_flight) > (1 if plan.seqs else 0):
        return land_oldest(engine)
    return {"prefill": 0, "decode": 0, "finished": []}

# %% id="ex01a-check" tags=["check"]
check("ex01a", globals())

# %% [markdown] id="ex01b"
# ## 01b · The KV ledger of any card
#
# Write `kv_ledger(model, gpu, utilization, block_size, max_model_len)`:
#
# `{"blocks": …, "tokens": …, "sequences": …}`: how many blocks fit, how many tokens they hold, how many sequences of
# full length can be there **at the same time**.
#
# <!-- zh -->
# ## 01b · 任意一张卡的 KV 账
#
# 写 `kv_ledger(model, gpu, utilization, block_size, max_model_len)`:
#
# `{"blocks": …, "tokens": …, "sequences": …}`:能放几个块,这些块能装几个 token,满长度的序列能**同时**放几条。

# %% [markdown] id="ex01b-rules"
# * `model` is a `ModelConfig`; `model.num_parameters()` counts its weights. The KV bytes of a token are yours to count.
# * `gpu` is a text such as `"12 GB"` or `"12 GiB"`. They are not the same.
# * weights and KV take 2 bytes a number, or 4 if `model.dtype` is `"float32"`.
# * budget = card × utilization; weights come off it; no activations.
# * the weights do not fit: `ValueError`. They fit and no block does: zeros.
#
# <!-- zh -->
# * `model` 是 `ModelConfig`,`model.num_parameters()` 数它的权重。每个 token 的 KV 字节数你自己算。
# * `gpu` 是 `"12 GB"` 或 `"12 GiB"` 这样的文字,两者不是一回事。
# * 权重和 KV 每个数占 2 字节;`model.dtype` 是 `"float32"` 时占 4 字节。
# * 预算 = 显存 × 利用率,再减去权重;不算激活值。
# * 权重装不下:抛 `ValueError`。权重装得下、一个块都放不下:全是 0。

# %% [markdown] id="ex01b-hints"
# <!-- hints ex01b -->
#
# <!-- zh -->
# <!-- hints ex01b -->

# %% id="ex01b-answer" tags=["answer"]
from nanoengine.model.config import NAMED_CONFIGS

# --- stub
def kv_ledger(model, gpu, utilization, block_size, max_model_len):  # yours
    raise NotImplementedError("ex01b")
# --- solution
UNITS = {"GB": 10**9, "GiB": 2**30}


def kv_ledger(model, gpu, utilization, block_size, max_model_len):
    amount, unit = gpu.split()
    budget = int(float(amount) * UNITS[unit] * utilization)
    width = 4 if model.dtype == "float32" else 2
    weights = model.num_parameters() * width
    if weights > budget:
        raise ValueError(f"the weights take {weights:,} bytes, the budget is {budget:,}")
    token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * width
    blocks = (budget - weights) // (token * block_size)
    full = -(-max_model_len // block_size)
    return {"blocks": blocks, "tokens": blocks * block_size, "sequences": blocks // full}

# %% id="ex01b-check" tags=["check"]
check("ex01b", globals())

# %% [markdown] id="next"
# Both green? In a terminal, `nanoengine course status` says what is next.
#
# <!-- zh -->
# 都绿了?在终端里运行 `nanoengine course status`,它会告诉你下一步。
