"""The start of a decode step: which token each row feeds, its newest block, and its embedding."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from nanoengine.kernels.common import begin, overlapped, power_of_two
from nanoengine.kernels.contract import Contract, ModelTensors


def decode_inputs_reference(ids, sources, previous, positions, slots, table_rows, tables, embedding, block_size: int,
                            first: int = 0):  # fmt: skip
    """See decode_inputs."""
    ids = torch.where(sources >= 0, previous[sources.clamp(min=0)], ids)
    real = slots >= 0
    tables[table_rows[real], positions[real] // block_size] = (slots[real] // block_size).int()
    ids = ids - first
    mine = (ids >= 0) & (ids < len(embedding))
    return embedding[ids * mine].masked_fill(~mine[:, None], 0)


def decode_inputs(ids, sources, previous, positions, slots, table_rows, tables, embedding, block_size: int,
                  first: int = 0):  # fmt: skip
    """Returns the embedded tokens [B, hidden]; writes each row's newest block into its line of ``tables``.

    ids: int64 [B]; where sources >= 0 the id is previous[sources], which the step before sampled and
    the host has not seen yet. A slot names its block (slot // block_size), so a block table on the
    device grows without anything but the slots being sent. A row with slot -1 is padding. first: the id of
    embedding's first row; an id that is not in ``embedding`` gets zeros (it is another rank's, or negative: the
    row got no token and is thrown away).
    """
    rows, hidden = len(ids), embedding.shape[1]
    out = embedding.new_empty(rows, hidden)
    _decode_inputs[(rows,)](
        ids, sources, previous, positions, slots, table_rows, tables, embedding, out, tables.stride(0), first,
        len(embedding), BLOCK_SIZE=block_size, HIDDEN=hidden, PAD=power_of_two(hidden), **overlapped(out),
    )  # fmt: skip
    return out


def _warmup(m: ModelTensors) -> list:
    zeros, none = m.numbers(0, 0), m.numbers(-1, -1)
    tables = torch.zeros(2, 16, dtype=torch.int32, device=zeros.device)
    rows = (zeros, none, zeros, zeros, none, zeros)
    return [partial(decode_inputs, *rows, tables, m.embed_tokens, m.block_size)]


CONTRACT = Contract(
    references={decode_inputs: decode_inputs_reference},
    early_reads={"_decode_inputs": ()},
    warmup=_warmup,
)


@triton.jit
def _decode_inputs(ids, sources, previous, positions, slots, table_rows, tables, embedding, out, table_stride, first,
                   vocabulary, BLOCK_SIZE: tl.constexpr, HIDDEN: tl.constexpr, PAD: tl.constexpr,
                   OVERLAP: tl.constexpr):  # fmt: skip
    begin(OVERLAP)
    row, column = tl.program_id(0), tl.arange(0, PAD)
    source = tl.load(sources + row)
    token = tl.load(ids + row)
    if source >= 0:
        token = tl.load(previous + source)
    slot = tl.load(slots + row)
    if slot >= 0:
        place = tl.load(table_rows + row) * table_stride + tl.load(positions + row) // BLOCK_SIZE
        tl.store(tables + place, (slot // BLOCK_SIZE).to(tl.int32))
    token -= first
    mine = (token >= 0) & (token < vocabulary)
    x = tl.load(embedding + token * HIDDEN + column, mask=(column < HIDDEN) & mine, other=0.0)
    tl.store(out + row.to(tl.int64) * HIDDEN + column, x, mask=column < HIDDEN)
