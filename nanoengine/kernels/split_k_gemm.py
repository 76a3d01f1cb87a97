"""GEMM of a decode step: few rows, so that all the time goes into reading the weights.

cuBLAS waits for the kernel ahead, then starts to read. These programs first ask for their weights,
which no kernel writes, and then wait: the bytes travel to the L2 cache meanwhile. Where a matrix
has few outputs, several programs share its inputs (split-K): each adds up its own range of them,
and the norm that follows adds the partials.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoengine.kernels.common import let_next_start, overlapped, wait_for_last
from nanoengine.kernels.contract import Contract, ModelTensors

MAX_ROWS = 256
MAX_ROWS_WHOLE = 64  # without split-K: with more rows cuBLAS is as fast
MAX_BYTES = 16 << 20  # of a matrix: larger ones keep cuBLAS busy reading for long enough
SPLIT_K = 4
# block_m, block_k and num_stages of GemmConfig: the first whose block_m holds all rows
SIZES = ((16, 128, 4), (32, 128, 4), (64, 128, 4), (128, 64, 5))
BLOCK_N = 64  # outputs per program: what one matrix instruction of a Hopper GPU computes at once


@dataclass(frozen=True)
class GemmConfig:
    """Of one program: block_m rows; block_k inputs per load, num_stages such loads in flight.

    split_k: programs that share one output's inputs.
    """

    block_m: int
    block_k: int
    num_stages: int
    split_k: int


@cache
def choose_config(rows: int, outputs: int, may_split: bool) -> GemmConfig | None:
    """What was fastest on an H200 (bench/results/h200_products.json); None: cuBLAS was."""
    size = next((size for size in SIZES if rows <= size[0]), SIZES[-1])
    programs = triton.cdiv(rows, size[0]) * triton.cdiv(outputs, BLOCK_N)
    split_k = SPLIT_K if may_split and programs <= 40 else 1
    if not 2 <= rows <= (MAX_ROWS if split_k > 1 else MAX_ROWS_WHOLE):
        return None
    return GemmConfig(*size, split_k)


def plan_gemm(x: torch.Tensor, weight: torch.Tensor, may_split: bool = False) -> GemmConfig | None:
    """How to compute x [T, in] times weight [out, in] transposed; None: not with this kernel."""
    # the matrix units have no exact float32
    inexact = weight.dtype == torch.float32 and x.device.type == "cuda"
    if inexact or not 0 < weight.nbytes <= MAX_BYTES or weight.shape[1] % 8:
        return None
    if not _has_tma(x.device):
        return None
    # the memory unit takes whole rows, from addresses that are multiples of 16 bytes
    if not all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (x, weight)):
        return None
    return choose_config(len(x), len(weight), may_split)


@cache
def _has_tma(device: torch.device) -> bool:
    """Hopper's memory unit, which fetches whole tiles. Triton's interpreter has it on a CPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def split_k_gemm_reference(x, weight, bias, config: GemmConfig) -> torch.Tensor:
    """See split_k_gemm."""
    if config.split_k == 1:
        return F.linear(x, weight, bias)
    n = inputs_per_split(x.shape[1], config)
    starts = range(0, config.split_k * n, n)
    partials = [x[:, i : i + n] @ weight[:, i : i + n].t() for i in starts]
    if bias is not None:
        partials[0] = partials[0] + bias
    return torch.stack(partials)


def inputs_per_split(inputs: int, config: GemmConfig) -> int:
    return triton.cdiv(inputs, config.split_k * config.block_k) * config.block_k


def split_k_gemm(x, weight, bias, config: GemmConfig) -> torch.Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out] or None. in: a multiple of 8.

    Returns [T, out]; with config.split_k above 1 the partials [split_k, T, out], whose sum it is.
    Each partial is rounded to x's type.
    """
    (rows, inputs), outputs = x.shape, len(weight)
    out = x.new_empty(config.split_k, rows, outputs)
    grid = (triton.cdiv(outputs, BLOCK_N), triton.cdiv(rows, config.block_m), config.split_k)
    x_tiles, weight_tiles = [config.block_m, config.block_k], [BLOCK_N, config.block_k]
    _split_k_gemm[grid](
        TensorDescriptor(x, [rows, inputs], [inputs, 1], x_tiles),
        TensorDescriptor(weight, [outputs, inputs], [inputs, 1], weight_tiles),
        weight,
        weight if bias is None else bias,
        out,
        rows,
        K=inputs,
        N=outputs,
        BLOCK_M=config.block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=config.block_k,
        K_PER_SPLIT=inputs_per_split(inputs, config),
        BIAS=bias is not None,
        **overlapped(out),
        num_warps=4,
        num_stages=config.num_stages,
    )
    return out[0] if config.split_k == 1 else out


def _warmup(m: ModelTensors) -> list:
    """Each linear layer with each size of blocks."""
    calls = []
    for linear, may_split in (
        (m.qkv_proj, False),
        (m.gate_up_proj, False),
        (m.o_proj, m.split_k),
        (m.down_proj, m.split_k),
    ):
        for rows, *_ in SIZES if linear is not None else ():
            x = m.zeros(rows, linear.weight.shape[1])
            config = plan_gemm(x, linear.weight, may_split)
            if config is not None:
                calls.append(partial(split_k_gemm, x, *linear, config))
    return calls


CONTRACT = Contract(
    references={split_k_gemm: split_k_gemm_reference},
    early_reads={"_split_k_gemm": ()},  # it asks for its weights, but loads them later
    warmup=_warmup,
    hopper=True,
    prefetches=True,
)


@triton.jit(do_not_specialize=["rows"])
def _split_k_gemm(
    x,
    weight,
    raw_weight,
    bias,
    out,
    rows,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_PER_SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M rows from K_PER_SPLIT inputs.

    Beyond the ends of a matrix a descriptor reads zeros.
    """
    let_next_start(OVERLAP)
    first_n, first_m = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    split = tl.program_id(2)
    first_k, n = split * K_PER_SPLIT, first_n + tl.arange(0, BLOCK_N)
    if OVERLAP:
        rows_of_weight = raw_weight + tl.minimum(n, N - 1)[:, None] * K
        _prefetch(rows_of_weight, first_k, K_PER_SPLIT, K)
    wait_for_last(OVERLAP)
    # The weights are the left operand: matrix instructions take 64 of its rows, and any small
    # number of columns of the right one.
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(first_k, first_k + K_PER_SPLIT, BLOCK_K):
        w = weight.load([first_n, k])
        acc = tl.dot(w, tl.trans(x.load([first_m, k])), acc)
    if BIAS:
        if split == 0:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    m = first_m + tl.arange(0, BLOCK_M)
    pointers = out + (split * rows + m)[None, :] * N + n[:, None]
    mask = (m < rows)[None, :] & (n < N)[:, None]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _prefetch(pointers, first_k, K_PER_SPLIT: tl.constexpr, K: tl.constexpr):
    """Ask for K_PER_SPLIT values of each row from first_k on, for the L2 cache.

    pointers: [*, 1], to rows of 16-bit values.
    """
    VALUES: tl.constexpr = 64  # of 16 bits, in a cache line of 128 bytes
    LINES: tl.constexpr = 8
    for k in range(0, K_PER_SPLIT, LINES * VALUES):
        value = tl.minimum(first_k + k + tl.arange(0, LINES) * VALUES, K - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(pointers + value[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
