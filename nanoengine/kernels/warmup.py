"""Compile all kernels of a model at once: a second each one after the other, but the compiler runs in threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from nanoengine.kernels.decode_inputs import decode_inputs
from nanoengine.kernels.draw import draw
from nanoengine.kernels.gemv import fits, gemv, norm_gemv, swiglu_gemv
from nanoengine.kernels.norm import add_norm
from nanoengine.kernels.product import PARTS, SIZES, plan_product, product
from nanoengine.kernels.rope_store import rope_store
from nanoengine.kernels.swiglu import swiglu


def compile_in_threads(model, block_size: int, calls=(), threads: int = 8) -> None:
    """Call each kernel once with the model's sizes; ``calls``: further functions to call likewise.

    A kernel that is called later with other types or alignments is compiled then, as always.
    """
    device, dtype = model.embed_tokens.device, model.embed_tokens.dtype

    def run(call) -> None:
        with torch.cuda.device(device), torch.inference_mode():
            torch.cuda.synchronize()  # binds this thread to the GPU, without which it can make no tensor map
            call()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, [*calls, *_calls(model, block_size, device, dtype)]))
    torch.cuda.synchronize(device)


def _calls(model, block_size: int, device, dtype) -> list:
    c, layer = model.config, model.layers[0]
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm
    x1, x2 = (torch.zeros(n, c.hidden_size, dtype=dtype, device=device) for n in (1, 2))
    gate_up1, gate_up2 = (x.new_zeros(len(x), 2 * c.intermediate_size) for x in (x1, x2))
    heads1 = x1.new_zeros(1, attention.heads * c.head_dim)
    qkv, logits = x2.new_zeros(2, len(attention.qkv_proj.weight)), x2.new_zeros(2, c.vocab_size)
    cache = x2.new_zeros(2, 1, block_size, c.num_key_value_heads, c.head_dim)
    none, zeros = torch.full((2,), -1, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    tables, rope = torch.zeros(2, 16, dtype=torch.int32, device=device), model.rope
    weights = (attention.q_norm.weight, attention.k_norm.weight) if c.qk_norm else (None, None)

    def gemv_with(product, delta):
        return lambda: norm_gemv(x1, delta, norm.weight, norm.eps, product.weight, product.bias)

    calls = [
        lambda: rope_store(qkv, attention.heads, *weights, c.rms_norm_eps, rope.cos, rope.sin, zeros, cache, none),
        lambda: draw(logits, zeros.double(), zeros, zeros, zeros.clone()),
        lambda: add_norm(x2.clone(), x2, norm.weight, norm.eps),
        lambda: add_norm(x2.clone(), None, norm.weight, norm.eps),
        lambda: swiglu(gate_up2),
        lambda: decode_inputs(zeros, none, zeros, zeros, none, zeros, tables, model.embed_tokens, block_size),
    ]
    if fits(attention.qkv_proj.weight):
        calls += [
            gemv_with(attention.qkv_proj, x1.clone()),
            gemv_with(attention.qkv_proj, None),
            gemv_with(mlp.gate_up_proj, x1.clone()),
            lambda: gemv(x1, model.lm_head),
        ]
    if fits(attention.o_proj.weight):
        calls.append(lambda: gemv(heads1, attention.o_proj.weight, attention.o_proj.bias))
    if fits(mlp.down_proj.weight):
        calls.append(lambda: swiglu_gemv(gate_up1, mlp.down_proj.weight, mlp.down_proj.bias))
    return calls + _products(model)


def _products(model) -> list:
    """A product of each kind and size of tiles, and the norm that adds its parts."""
    layer, parts = model.layers[0], getattr(model.ops, "parts", False)
    norm, calls = layer.input_layernorm, []
    several = [(layer.self_attn.qkv_proj, False), (layer.mlp.gate_up_proj, False)]
    several += [(layer.self_attn.o_proj, parts), (layer.mlp.down_proj, parts)]
    for packed, may_split in several:
        for rows, *_ in SIZES:
            x = packed.weight.new_zeros(rows, packed.weight.shape[1])
            tiles = plan_product(x, packed.weight, may_split)
            if tiles is not None:
                calls.append(partial(product, x, packed.weight, packed.bias, tiles))
    if parts:
        stream, delta = norm.weight.new_zeros(2, len(norm.weight)), norm.weight.new_zeros(PARTS, 2, len(norm.weight))
        calls.append(partial(add_norm, stream, delta, norm.weight, norm.eps))
    return calls
