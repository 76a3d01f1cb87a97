"""The GEMMs of a decode step by themselves: our kernel beside cuBLAS, microseconds per layer.

Each GEMM with the norm that follows, which adds its split-K partials; all layers, each with weights
of its own, in one CUDA graph.
"""

from __future__ import annotations

import torch

from nanoengine.bench.attention import seconds_of
from nanoengine.bench.gpu import machine, tell
from nanoengine.kernels.rms_norm import fused_add_rms_norm
from nanoengine.kernels.split_k_gemm import (
    SIZES,
    SPLIT_K,
    GemmConfig,
    choose_config,
    split_k_gemm,
)
from nanoengine.model.config import NAMED_CONFIGS, ModelConfig

ROWS = (2, 8, 16, 32, 48, 64, 80, 96, 128, 160, 208, 256)


def shapes(c: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """By linear layer: outputs, inputs, and whether it may be split-K."""
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {
        "qkv": (heads + 2 * kv, c.hidden_size, False),
        "o": (c.hidden_size, heads, True),
        "gate_up": (2 * c.intermediate_size, c.hidden_size, False),
        "down": (c.hidden_size, c.intermediate_size, True),
    }


def variants(rows: int, may_split: bool) -> list[GemmConfig]:
    """The smallest blocks that hold all rows, the two largest if none does; whole, or split-K."""
    sizes = [size for size in SIZES[:-1] if rows <= size[0]][:1] or SIZES[-2:]
    splits = (1, 2, SPLIT_K, 8) if may_split else (1,)
    return [GemmConfig(*size, split_k) for size in sizes for split_k in splits]


def measure(
    model: str = "qwen3-0.6b",
    rows=ROWS,
    dtype: torch.dtype = torch.bfloat16,
    say=tell,
    device: str = "cuda",
) -> dict:
    """us of each linear layer and number of rows: cublas, and each variant by its label.

    chosen: the engine's choice. Errors: ValueError for rows below 1.
    """
    if min(rows) < 1:
        raise ValueError(f"--rows must be at least 1 each, got {min(rows)}")
    config, found = NAMED_CONFIGS[model], []
    for name, (outputs, inputs, may_split) in shapes(config).items():
        shape = (config.num_hidden_layers, outputs, inputs)
        weights = torch.empty(shape, dtype=dtype, device=device).normal_(std=0.03)
        for count in rows:
            x = torch.randn(count, inputs, device=weights.device).to(dtype)
            us = {"cublas": chain(x, weights, None, may_split)}
            for gemm in variants(count, may_split):
                us[label(gemm)] = chain(x, weights, gemm, may_split)
            chosen = label(choose_config(count, outputs, may_split))
            found.append({"product": name, "rows": count, "chosen": chosen, "us": us})
            say(line(found[-1]))
    return machine() | {
        "workload": "one GEMM and the norm that follows, per layer",
        "output_tok_s": None,
        "model": f"{model}, {str(dtype).removeprefix('torch.')}",
        "rows": found,
    }


def chain(
    x: torch.Tensor, weights: torch.Tensor, config: GemmConfig | None, may_split: bool
) -> float:
    """Microseconds per layer; config None: cuBLAS. may_split: the norm adds the output."""
    rows, outputs = len(x), weights.shape[1]
    residual, hidden, out = (x.new_zeros(rows, outputs) for _ in range(3))
    norm_weight = x.new_ones(outputs)

    def layers() -> None:
        for weight in weights:
            if config is None:
                y = torch.mm(x, weight.t(), out=out)
            else:
                y = split_k_gemm(x, weight, None, config)
            if may_split:
                fused_add_rms_norm(y, residual, norm_weight, 1e-6)
            else:
                fused_add_rms_norm(hidden, None, norm_weight, 1e-6)

    return round(1e6 * seconds_of(layers) / len(weights), 2)


def label(config: GemmConfig | None) -> str:
    if config is None:
        return "cublas"
    return f"{config.block_m}/{config.block_k}/{config.num_stages}/{config.split_k}"


def line(row: dict) -> str:
    """The engine's choice is marked, and so is the fastest."""
    fastest = min(row["us"], key=row["us"].get)
    cells = []
    for name, us in row["us"].items():
        chosen = "<" if name == row["chosen"] else ""
        cells.append(f"{name} {us}{chosen}{'*' if name == fastest else ''}")
    return f"{row['product']:8}{row['rows']:4} rows  " + "  ".join(cells)


def show(result: dict) -> str:
    head = f"{result['machine']}, {result['date']}: {result['model']}; us"
    head += ", < the engine's choice, * the fastest"
    return "\n".join([head, "block_m/block_k/num_stages/split_k", *map(line, result["rows"])])
