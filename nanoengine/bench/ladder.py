"""The ablation ladder: one engine, one speed-up more on each rung, all of them settings.

naive           every step computes all tokens again, one sequence at a time
kv cache        one token a step; requests in closed batches, each with room for max_model_len tokens
continuous      a request starts as soon as another one has ended
paging          blocks of 16 tokens: memory for what is there, not for what may come
prefix cache    (measured on prompts that begin alike, with and without)
CUDA graphs     a step is one launch
overlap         the host prepares the next step while the GPU runs this one
fused kernels   residual + norm, QK-norm + RoPE + store, SwiGLU, products for one token
"""

from __future__ import annotations

from statistics import median

from nanoengine.bench.gpu import fresh, machine, make_llm, nano_vllm_workload, timed
from nanoengine.bench.workload import Workload, synthetic
from nanoengine.engine.scheduler import Plan, TokenBudgetScheduler

POOL_GIB = 30.0  # of KV: 64 sequences if each reserves 4096 tokens, all 256 if each takes what it needs


class Naive(TokenBudgetScheduler):
    """Forgets all keys and values after each step."""

    def schedule(self) -> Plan:
        for seq in self.running:
            seq.num_computed_tokens = 0
        return super().schedule()


class ClosedBatches(TokenBudgetScheduler):
    """Admits only when nothing runs: a batch lasts as long as its longest request."""

    def schedule(self) -> Plan:
        plan = Plan()
        self.schedule_running(plan, self.running[:])
        if not plan.seqs:
            self.admit_waiting(plan)
        return plan


def workloads() -> dict[str, Workload]:
    """short: the first 16 requests, at most 128 tokens out; full: all 256; shared: prompts that begin alike."""
    full = nano_vllm_workload()
    short = Workload("the first 16 requests of nano-vllm bench.py, at most 128 tokens out", full.prompts[:16],
                     [min(n, 128) for n in full.output_lens[:16]])  # fmt: skip
    shared = synthetic("256 requests of 1088-1152 tokens of which 1024 are shared, 64 out", 256, (1088, 1152), (64, 64),
                       vocab_size=10000, shared_prefix=1024)  # fmt: skip
    return {"short": short, "full": full, "shared": shared}


def rungs() -> list[tuple[str, str, dict]]:
    """(name, workload, settings of the engine)"""
    base = dict(attention="triton", enforce_eager=True, fused_kernels=False, overlap=0, enable_prefix_caching=False,
                kv_cache_gib=POOL_GIB)  # fmt: skip
    whole = base | dict(block_size=4096)
    graphs = base | dict(enforce_eager=False, enable_prefix_caching=True)
    return [
        ("naive", "short", whole | dict(scheduler=Naive, max_num_seqs=1)),
        ("kv cache", "short", whole | dict(scheduler=ClosedBatches)),
        ("continuous batching", "short", whole),
        ("continuous batching", "full", whole),
        ("paging", "full", base),
        ("paging", "shared", base),
        ("prefix cache", "shared", base | dict(enable_prefix_caching=True)),
        ("prefix cache", "full", base | dict(enable_prefix_caching=True)),
        ("CUDA graphs", "full", graphs),
        ("overlap", "full", graphs | dict(overlap=1)),
        ("fused kernels", "full", graphs | dict(overlap=1, fused_kernels=True)),
    ]


def measure(model: str = "qwen3-0.6b", runs: int = 3, slow: float = 3.0, say=print) -> dict:
    """Each rung: a warm-up, then the median of ``runs`` runs (of one run, if a run takes over ``slow`` seconds)."""
    all_workloads, rows = workloads(), []
    for name, which, settings in rungs():
        workload = all_workloads[which]
        llm, _ = make_llm(model, **settings)
        with llm:
            timed(llm, Workload("warm-up", [p[:64] for p in workload.prompts[:8]], [4] * 8))
            seconds = []
            while len(seconds) < runs and (not seconds or seconds[0] < slow):
                again = workload if which == "shared" else fresh(workload, 100 + len(seconds))
                if which == "shared":  # another beginning each time
                    again = synthetic(workload.name, 256, (1088, 1152), (64, 64), vocab_size=10000,
                                      shared_prefix=1024, seed=len(seconds))  # fmt: skip
                seconds.append(timed(llm, again))
        rate = workload.num_output_tokens / median(seconds)
        rows.append({"rung": name, "workload": workload.name, "output_tok_s": round(rate, 1), "runs": len(seconds)})
        say(f"{name:20} {rate:10,.1f} tok/s  {workload.name}")
    return machine() | {"model": f"{model}, random weights, {POOL_GIB:g} GiB of KV", "rows": rows,
                        "workload": "see rows", "output_tok_s": rows[-1]["output_tok_s"]}  # fmt: skip
