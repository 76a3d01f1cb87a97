"""Matrix products of a decode step: few rows, so that all the time goes into reading the weights.

cuBLAS waits for the kernel before it, then starts to read. These programs first ask for their weights, which no
kernel writes, and then wait: the bytes travel to the L2 cache meanwhile. And where a matrix has few outputs, several
programs share its inputs (split-K): each adds up its own part, and the norm that follows adds the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoengine.kernels.common import let_next_start, overlapped, wait_for_last

MOST_ROWS = 256
MOST_ROWS_WHOLE = 64  # of a product that is not split: with more cuBLAS is as fast
MOST_BYTES = 16 << 20  # of a matrix: of larger ones cuBLAS is busy reading for long enough
PARTS = 4  # of a product that is split
# rows, depth and stages of Tiles: the first that holds all rows
SIZES = ((16, 128, 4), (32, 128, 4), (64, 128, 4), (128, 64, 5))
FEATURES = 64  # outputs a program: what one matrix instruction of a Hopper GPU computes at once


@dataclass(frozen=True)
class Tiles:
    """Of a program: rows, and inputs that it loads at a time; stages: such loads in flight; parts: see product."""

    rows: int
    depth: int
    stages: int
    parts: int


@cache
def tiles_of(rows: int, outputs: int, may_split: bool) -> Tiles | None:
    """What was fastest on an H200 (bench/results/h200_products.json); None: cuBLAS was."""
    size = next((size for size in SIZES if rows <= size[0]), SIZES[-1])
    programs = triton.cdiv(rows, size[0]) * triton.cdiv(outputs, FEATURES)
    parts = PARTS if may_split and programs <= 40 else 1
    if not 2 <= rows <= (MOST_ROWS if parts > 1 else MOST_ROWS_WHOLE):
        return None
    return Tiles(*size, parts)


def plan_product(x: torch.Tensor, weight: torch.Tensor, may_split: bool = False) -> Tiles | None:
    """How to compute x [T, in] times weight [out, in] transposed; None if it is not for this kernel."""
    slow = weight.dtype == torch.float32 and x.device.type == "cuda"  # its matrix units have no exact float32
    if slow or not 0 < weight.nbytes <= MOST_BYTES or weight.shape[1] % 8 or not _has_tma(x.device):
        return None
    # the memory unit takes whole rows, from addresses that are multiples of 16 bytes
    if not all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (x, weight)):
        return None
    return tiles_of(len(x), len(weight), may_split)


@cache
def _has_tma(device: torch.device) -> bool:
    """Hopper's memory unit, which fetches whole tiles; a CPU stands for it in Triton's interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def product_reference(x, weight, bias=None, parts: int = 1, depth: int = 128) -> torch.Tensor:
    """See product."""
    if parts == 1:
        return F.linear(x, weight, bias)
    length = part_length(x.shape[1], parts, depth)
    each = [x[:, i : i + length] @ weight[:, i : i + length].t() for i in range(0, parts * length, length)]
    return torch.stack([each[0] if bias is None else each[0] + bias, *each[1:]])


def part_length(inputs: int, parts: int, depth: int) -> int:
    return triton.cdiv(inputs, parts * depth) * depth


def product(x, weight, bias, tiles: Tiles) -> torch.Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out] or None: [T, out], or with several ``tiles.parts``
    [parts, T, out], whose sum it is; each part is rounded to x's type. in: a multiple of 8."""
    (rows, inputs), outputs = x.shape, len(weight)
    out = x.new_empty(tiles.parts, rows, outputs)
    grid = (triton.cdiv(outputs, FEATURES), triton.cdiv(rows, tiles.rows), tiles.parts)
    _product[grid](
        TensorDescriptor(x, [rows, inputs], [inputs, 1], [tiles.rows, tiles.depth]),
        TensorDescriptor(weight, [outputs, inputs], [inputs, 1], [FEATURES, tiles.depth]),
        weight, weight if bias is None else bias, out, rows,
        INPUTS=inputs, OUTPUTS=outputs, ROWS=tiles.rows, FEATURES=FEATURES, DEPTH=tiles.depth,
        LENGTH=part_length(inputs, tiles.parts, tiles.depth), BIAS=bias is not None,
        **overlapped(out), num_warps=4, num_stages=tiles.stages,
    )  # fmt: skip
    return out[0] if tiles.parts == 1 else out


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, raw_weight, bias, out, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
    LENGTH: tl.constexpr, BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """FEATURES outputs of ROWS rows from LENGTH inputs a program. Beyond the ends a descriptor reads zeros."""
    let_next_start(OVERLAP)
    first_output, first_row, part = tl.program_id(0) * FEATURES, tl.program_id(1) * ROWS, tl.program_id(2)
    begin, feature = part * LENGTH, first_output + tl.arange(0, FEATURES)
    if OVERLAP:
        _prefetch(raw_weight + tl.minimum(feature, OUTPUTS - 1)[:, None] * INPUTS, begin, LENGTH, INPUTS)
    wait_for_last(OVERLAP)
    # the weights are the left operand: matrix instructions take 64 of its rows, and any few columns of the right one
    total = tl.zeros((FEATURES, ROWS), tl.float32)
    for at in range(begin, begin + LENGTH, DEPTH):
        w = weight.load([first_output, at])
        total = tl.dot(w, tl.trans(x.load([first_row, at])), total)
    if BIAS:
        if part == 0:
            total += tl.load(bias + feature, mask=feature < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    row = first_row + tl.arange(0, ROWS)
    place = out + (part * rows + row)[None, :] * OUTPUTS + feature[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (feature < OUTPUTS)[:, None])


@triton.jit
def _prefetch(lines, begin, LENGTH: tl.constexpr, INPUTS: tl.constexpr):
    """Ask for LENGTH values from ``begin`` on of each row, for the L2 cache. lines: pointers [*, 1] to 16-bit rows."""
    VALUES: tl.constexpr = 64  # of 16 bits, in a cache line of 128 bytes
    SOME: tl.constexpr = 8
    for at in range(0, LENGTH, SOME * VALUES):
        value = tl.minimum(begin + at + tl.arange(0, SOME) * VALUES, INPUTS - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(lines + value[None, :]).to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
