"""The start of a decode step: the embedding of each row's token, and the newest entry of its block table."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from nanoengine.kernels.common import begin, overlapped, power_of_two
from nanoengine.kernels.contract import Contract, ModelTensors


def decode_inputs_reference(
    input_ids,
    token_rows,
    last_tokens,
    positions,
    slot_mapping,
    request_rows,
    block_tables,
    embedding,
    block_size: int,
    first_token: int = 0,
):
    """See decode_inputs."""
    input_ids = torch.where(token_rows >= 0, last_tokens[token_rows.clamp(min=0)], input_ids)
    real = slot_mapping >= 0
    block_tables[request_rows[real], positions[real] // block_size] = (
        slot_mapping[real] // block_size
    ).int()
    input_ids = input_ids - first_token
    mine = (input_ids >= 0) & (input_ids < len(embedding))
    return embedding[input_ids * mine].masked_fill(~mine[:, None], 0)


def decode_inputs(
    input_ids,
    token_rows,
    last_tokens,
    positions,
    slot_mapping,
    request_rows,
    block_tables,
    embedding,
    block_size: int,
    first_token: int = 0,
):
    """Returns the embedded tokens [B, hidden]; writes the new token's block into its row's block table.

    input_ids: int64 [B]; where token_rows >= 0 the id is last_tokens[token_rows], which the step
    before has sampled and the host has not seen yet. A slot names its block (slot // block_size), so
    a block table on the device grows without being sent. A row with slot -1 is padding. request_rows:
    int64 [B], lines of block_tables. first_token: the id of embedding's first row; an id that is not
    in ``embedding`` gets zeros (it is another rank's, or negative: the row is thrown away).
    """
    rows, hidden = len(input_ids), embedding.shape[1]
    out = embedding.new_empty(rows, hidden)
    _decode_inputs[(rows,)](
        input_ids,
        token_rows,
        last_tokens,
        positions,
        slot_mapping,
        request_rows,
        block_tables,
        embedding,
        out,
        block_tables.stride(0),
        first_token,
        len(embedding),
        BLOCK_SIZE=block_size,
        HIDDEN=hidden,
        PAD=power_of_two(hidden),
        **overlapped(out),
    )
    return out


def _warmup(m: ModelTensors) -> list:
    zeros, none = m.numbers(0, 0), m.numbers(-1, -1)
    block_tables = torch.zeros(2, 16, dtype=torch.int32, device=zeros.device)
    rows = (zeros, none, zeros, zeros, none, zeros)
    return [partial(decode_inputs, *rows, block_tables, m.embed_tokens, m.block_size)]


CONTRACT = Contract(
    references={decode_inputs: decode_inputs_reference},
    early_reads={"_decode_inputs": ()},
    warmup=_warmup,
)


@triton.jit
def _decode_inputs(
    input_ids,
    token_rows,
    last_tokens,
    positions,
    slot_mapping,
    request_rows,
    block_tables,
    embedding,
    out,
    table_stride,
    first_token,
    vocabulary,
    BLOCK_SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row, column = tl.program_id(0), tl.arange(0, PAD)
    token_row = tl.load(token_rows + row)
    token = tl.load(input_ids + row)
    if token_row >= 0:
        token = tl.load(last_tokens + token_row)
    slot = tl.load(slot_mapping + row)
    if slot >= 0:
        place = tl.load(request_rows + row) * table_stride + tl.load(positions + row) // BLOCK_SIZE
        tl.store(block_tables + place, (slot // BLOCK_SIZE).to(tl.int32))
    token -= first_token
    mine = (token >= 0) & (token < vocabulary)
    x = tl.load(embedding + token * HIDDEN + column, mask=(column < HIDDEN) & mine, other=0.0)
    tl.store(out + row.to(tl.int64) * HIDDEN + column, x, mask=column < HIDDEN)
