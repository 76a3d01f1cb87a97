"""The decode kernel by itself: microseconds a layer, and how much of the card's memory bandwidth that is.

Scenes are rows and contexts of decode steps: those of nano-vllm's workload after some steps, and few rows. A layer is
the kernel and the one that combines; all layers of the model, each with a cache of its own, run in one CUDA graph.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from triton.testing import do_bench_cudagraph

from nanoengine.attention.triton_attention import extra_kv_splits
from nanoengine.bench.gpu import machine, nano_vllm_workload, tell
from nanoengine.bench.roofline import find_card
from nanoengine.kernels.kv_splits import plan_kv_splits
from nanoengine.kernels.paged_decode import Tuning, paged_decode
from nanoengine.model.config import NAMED_CONFIGS

STEPS = (100, 215, 450, 600, 730, 850, 970)
FEW = ([1200 + 100 * i for i in range(8)], [1000, 1500, 700, 1800], [400], [1500], [4000])


@dataclass(frozen=True)
class Scene:
    """contexts: int64 [R]. tables: int32 [R, *], blocks as an engine hands them out: prompts in one run, then one at
    a time to whoever needs one. num_blocks: of the pool."""

    contexts: np.ndarray
    tables: np.ndarray
    num_blocks: int

    @property
    def name(self) -> str:
        return f"{len(self.contexts)} x {round(self.contexts.mean())}"


def scene_of(prompt_lens: list[int], steps: int, output_lens: list[int] | None, block_size: int) -> Scene:
    """What decodes ``steps`` steps after all prompts have started; output_lens None: all of them."""
    lens = output_lens or [steps + 1] * len(prompt_lens)
    tables: list[list[int]] = []
    taken = 0
    for n in prompt_lens:
        blocks = -(-n // block_size)
        tables.append(list(range(taken, taken + blocks)))
        taken += blocks
    for step in range(1, steps + 1):
        for table, n, out in zip(tables, prompt_lens, lens, strict=True):
            if out > step and n + step > len(table) * block_size:
                table.append(taken)
                taken += 1
    left = [i for i, out in enumerate(lens) if out > steps]
    lines = np.zeros((len(left), max(len(tables[i]) for i in left)), np.int32)
    for line, i in zip(lines, left, strict=True):
        line[: len(tables[i])] = tables[i]
    return Scene(np.array([prompt_lens[i] + steps for i in left], np.int64), lines, taken)


def scenes(block_size: int) -> list[Scene]:
    work = nano_vllm_workload()
    lens = list(map(len, work.prompts))
    many = [scene_of(lens, steps, work.output_lens, block_size) for steps in STEPS]
    return many + [scene_of(contexts, 0, None, block_size) for contexts in FEW]


def measure(model: str = "qwen3-0.6b", tunings: list[Tuning] = (), extra_splits: list[int | None] = (None,),
            ranks: int = 1, block_size: int = 16, say=tell) -> dict:  # fmt: skip
    """Each tuning (all by default: the engine's own) with each number of extra KV splits (None: the engine's own).

    ranks: measure one rank's share of the KV heads. Errors: ValueError for ranks that do not divide them.
    """
    c = NAMED_CONFIGS[model]
    if ranks < 1 or c.num_key_value_heads % ranks:
        raise ValueError(f"--ranks must divide the {c.num_key_value_heads} KV heads of {model}, got {ranks}")
    c = replace(c, num_key_value_heads=c.num_key_value_heads // ranks,
                num_attention_heads=c.num_attention_heads // ranks)  # fmt: skip
    found = scenes(block_size)
    shape = (c.num_hidden_layers, 2, max(s.num_blocks for s in found), block_size, c.num_key_value_heads, c.head_dim)
    caches = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
    rows = []
    for tuning, extra in itertools.product(tunings or [Tuning()], extra_splits):
        figures = {scene.name: layer_figures(scene, c, caches, tuning, extra) for scene in found}
        rows.append({"tile": tuning.tile, "warps": tuning.warps, "stages": tuning.stages, "spare_pieces": extra,
                     "scenes": figures})  # fmt: skip
        say(" ".join(f"{f['us']:8.1f}" for f in figures.values()))
    card = find_card(torch.cuda.get_device_name())
    return machine() | {
        "workload": "attention of one decode step: rows x mean context", "output_tok_s": None,
        "model": f"{model}, one of {ranks} ranks: {c.num_key_value_heads} KV heads of {c.head_dim}, bf16, blocks of "
        f"{block_size}",
        "bandwidth": card and card.bandwidth, "rows": rows,
    }  # fmt: skip


def layer_figures(scene: Scene, config, caches: torch.Tensor, tuning: Tuning, extra: int | None) -> dict:
    """us: a layer, the median; tb_s: terabytes a second of keys and values."""
    kv_heads, rows, device = config.num_key_value_heads, len(scene.contexts), caches.device
    extra = extra_kv_splits(rows, kv_heads) if extra is None else extra
    plan = plan_kv_splits(scene.contexts, np.arange(rows), extra, tile=tuning.tile)
    kv_splits, combined, tables = (torch.from_numpy(x).to(device) for x in (*plan, scene.tables))
    q = torch.randn(rows, config.num_attention_heads, config.head_dim, device=device).to(caches.dtype)
    lines, out = torch.arange(rows, device=device), torch.empty_like(q)

    def layers() -> None:
        for cache in caches:
            paged_decode(q, cache, tables, lines, lines, kv_splits, combined, out, config.head_dim**-0.5, tuning)

    seconds = seconds_of(layers) / len(caches)
    moved = int(scene.contexts.sum()) * 2 * kv_heads * config.head_dim * caches.element_size()
    return {"us": round(1e6 * seconds, 1), "tb_s": round(moved / seconds / 1e12, 2)}


def seconds_of(work) -> float:
    """Median, of replays of a CUDA graph, so that the host's launches do not count."""
    return do_bench_cudagraph(work, return_mode="median") / 1e3


def show(result: dict) -> str:
    """Terabytes a second, a line a variant; the largest of a column is marked."""
    names = list(result["rows"][0]["scenes"])
    best = {name: max(row["scenes"][name]["tb_s"] for row in result["rows"]) for name in names}
    of = f", of {result['bandwidth'] / 1e12:g}" if result["bandwidth"] else ""
    lines = [f"{result['machine']}, {result['date']}: {result['model']}", f"TB/s{of}; rows x mean context:",
             "tile warps stages extra " + "".join(f"{name:>12}" for name in names)]  # fmt: skip
    for row in result["rows"]:
        extra = "own" if row["spare_pieces"] is None else row["spare_pieces"]
        reached = {name: figures["tb_s"] for name, figures in row["scenes"].items()}
        cells = "".join(f"{rate:>11.2f}{'*' if rate == best[name] else ' '}" for name, rate in reached.items())
        lines.append(f"{row['tile']:4} {row['warps']:5} {row['stages']:6} {extra:>5} {cells}")
    return "\n".join(lines)
