"""The matrix products of a decode step by themselves: our kernel beside cuBLAS, microseconds a layer.

Each product with the norm that follows, which adds the product's parts; all layers, each with weights of its own, in
one CUDA graph.
"""

from __future__ import annotations

import torch

from nanoengine.bench.attention import seconds_of
from nanoengine.bench.gpu import machine, tell
from nanoengine.kernels.norm import add_norm
from nanoengine.kernels.product import PARTS, SIZES, Tiles, product, tiles_of
from nanoengine.model.config import NAMED_CONFIGS, ModelConfig

ROWS = (2, 8, 16, 32, 48, 64, 80, 96, 128, 160, 208, 256)


def shapes(c: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """By product: outputs, inputs, and whether it may come in parts."""
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return {"qkv": (heads + 2 * kv, c.hidden_size, False), "o": (c.hidden_size, heads, True),
            "gate_up": (2 * c.intermediate_size, c.hidden_size, False),
            "down": (c.hidden_size, c.intermediate_size, True)}  # fmt: skip


def variants(rows: int, may_split: bool) -> list[Tiles]:
    """The smallest tiles that hold so many rows, the two largest for more than those hold; whole, or in parts."""
    sizes = [size for size in SIZES[:-1] if rows <= size[0]][:1] or SIZES[-2:]
    return [Tiles(*size, parts) for size in sizes for parts in ((1, 2, PARTS, 8) if may_split else (1,))]


def measure(model: str = "qwen3-0.6b", rows=ROWS, dtype: torch.dtype = torch.bfloat16, say=tell,
            device: str = "cuda") -> dict:  # fmt: skip
    """us of each product and number of rows: cublas, and each variant by rows/depth/stages/parts; chosen: the engine's.

    Errors: ValueError for rows below 1.
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
            us |= {label(tiles): chain(x, weights, tiles, may_split) for tiles in variants(count, may_split)}
            chosen = tiles_of(count, outputs, may_split)
            found.append({"product": name, "rows": count, "chosen": label(chosen), "us": us})
            say(line(found[-1]))
    return machine() | {"workload": "one product and the norm that follows, a layer", "output_tok_s": None,
                        "model": f"{model}, {str(dtype).removeprefix('torch.')}", "rows": found}  # fmt: skip


def chain(x: torch.Tensor, weights: torch.Tensor, tiles: Tiles | None, may_split: bool) -> float:
    """Microseconds a layer; tiles None: cuBLAS. may_split: the norm adds the product to a stream of its width."""
    rows, outputs = len(x), weights.shape[1]
    stream, out = (x.new_zeros(rows, outputs) for _ in range(2))
    norm_weight = x.new_ones(outputs)

    def layers() -> None:
        for weight in weights:
            y = torch.mm(x, weight.t(), out=out) if tiles is None else product(x, weight, None, tiles)
            add_norm(stream, y if may_split else None, norm_weight, 1e-6)

    return round(1e6 * seconds_of(layers) / len(weights), 2)


def label(tiles: Tiles | None) -> str:
    return "cublas" if tiles is None else f"{tiles.rows}/{tiles.depth}/{tiles.stages}/{tiles.parts}"


def line(row: dict) -> str:
    """The engine's choice is marked, and so is the fastest."""
    fastest = min(row["us"], key=row["us"].get)
    marks = {name: ("<" if name == row["chosen"] else "") + ("*" if name == fastest else "") for name in row["us"]}
    return f"{row['product']:8}{row['rows']:4} rows  " + "  ".join(f"{n} {us}{marks[n]}" for n, us in row["us"].items())


def show(result: dict) -> str:
    head = f"{result['machine']}, {result['date']}: {result['model']}; us, < the engine's choice, * the fastest"
    return "\n".join([head, "rows a tile/inputs a load/stages/parts", *map(line, result["rows"])])
