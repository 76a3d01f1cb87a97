"""The two exercises of lesson 01."""

from __future__ import annotations

from nanoengine.course.checks import lesson_01_ledger as ledger
from nanoengine.course.checks import lesson_01_step as step
from nanoengine.course.checks.exercise import Exercise, Section
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.model.config import ModelConfig

STEP = Exercise(
    id="ex01a",
    name="step",
    title=dict(en="A step that does not wait", zh="不等结果的 step"),
    section=Section("01", "source-intro", dict(en="3 · Open the source", zh="3 · 打开源码")),
    hints=(
        dict(
            en="Start from the lesson's `MyEngine.step`. `engine.in_flight` is a list: put each "
            "`InFlight(plan, batch, pending)` at its end, and land the one at its front.",
            zh="从课里的 `MyEngine.step` 出发。`engine.in_flight` 是个列表:新的 `InFlight(plan, batch, "
            "pending)` 放到末尾,要收就收最前面那个。",
        ),
        dict(
            en="Three moments to land: before scheduling, if something is in flight and "
            "`engine.scheduler.must_land_first()`; after launching, if two are in flight; and when the plan "
            "is empty. "
            "In all other calls nothing lands.",
            zh="该收的时刻有三个:调度之前,如果有在飞的而且 `engine.scheduler.must_land_first()`;发出之后,如果已"
            "有两步在飞;以及 plan 为空的时候。其余的调用什么都不收。",
        ),
        dict(
            en="`engine.build_batch(plan)` lays out the batch. `land(step, manager)` returns a "
            "`StepOutput` with `num_prefill_tokens`, "
            "`num_decode_tokens` and "
            "`finished`; the finished ones leave `engine.sequences` and go to `engine.scheduler.retire(...)`.",
            zh="`engine.build_batch(plan)` 排好这一批。`land(step, manager)` 返回的 `StepOutput` 里有"
            " `num_prefill_tokens`、"
            "`num_decode_tokens` 和 `finished`;结束的要从 `engine.sequences` 里删掉,再交给"
            " `engine.scheduler.retire(…)`。",
        ),
    ),
    run=step.run_step,
    boundaries=step.BOUNDARIES,
    random_case=step.random_case,
    smaller=step.smaller,
    show=step.show,
    explain=step.explain,
    forbidden=(LLMEngine.step, LLMEngine._land, LLMEngine.run, step.expected_output),
)

LEDGER = Exercise(
    id="ex01b",
    name="kv_ledger",
    title=dict(en="The KV ledger of any card", zh="任意一张卡的 KV 账"),
    section=Section("01", "ledger-intro", dict(en="9 · The ledger: why KV memory rules everything",
                                               zh="9 · 算笔账:KV 显存为什么说了算")),  # fmt: skip
    hints=(
        dict(
            en="Four lines: bytes of the card; times utilization, less the weights; divided by the bytes of one "
            "block; "
            "blocks a full sequence needs.",
            zh="四行就够:显卡的字节数;乘利用率,减权重;除以一个块的字节数;一条满长度序列要几块。",
        ),
        dict(
            en='`amount, unit = gpu.split()`; GB is 10**9 and GiB 2**30. A token keeps 2 (K and V) x layers x **KV** '
            "heads x head_dim numbers, of 4 bytes for float32 and 2 otherwise.",
            zh="`amount, unit = gpu.split()`;GB 是 10**9,GiB 是 2**30。每个 token 存 2(K 和 V)× 层数 × **KV** 头"
            "数 × head_dim 个数;float32 每个 4 字节,其余 2 字节。",
        ),
        dict(
            en="A sequence owns `-(-max_model_len // block_size)` whole blocks; so many fit: `blocks // that`. "
            "If the "
            "weights alone are above the budget, `raise ValueError` with both numbers in its text.",
            zh="一条序列占 `-(-max_model_len // block_size)` 个整块,能放 `blocks // 它` 条。光权重就超过预算时"
            ",`raise ValueError`,把两个数都写进消息里。",
        ),
    ),
    run=ledger.run_ledger,
    boundaries=ledger.BOUNDARIES,
    random_case=ledger.random_case,
    smaller=ledger.smaller,
    show=ledger.show,
    forbidden=(ModelConfig.kv_bytes_per_token, ledger.fill_the_card, ledger.weight_shapes),
)  # fmt: skip

EXERCISES = (STEP, LEDGER)
