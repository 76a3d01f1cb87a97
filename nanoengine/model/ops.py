"""What a decoder layer does between attention and its matrix products: one class a way to run it.

``TorchOps`` runs anywhere and is the reference; ``kernels.ops.TritonOps`` has the same methods in
fewer kernels. A decoder holds one of them, so there is one decoder, not two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nanoengine.model.layers import PackedLinear, RMSNorm, RotaryTable, linear, rotate


class TorchOps:
    """``stream`` is the residual stream [T, hidden]; ``delta`` [T, hidden] or None is what the last
    sub-layer adds to it, handed on unadded so that addition and norm can share one pass."""

    def embed(self, input_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, table)

    def rope(self, table: RotaryTable, positions: torch.Tensor, dtype: torch.dtype) -> Any:
        """What ``turn`` needs to know of the positions, once a step for all layers."""
        return table(positions, dtype)

    def norm(self, stream, delta, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """(stream + delta, its norm)"""
        stream = stream if delta is None else stream + delta
        return stream, norm(stream)

    def norm_product(self, stream, delta, norm: RMSNorm, product: PackedLinear) -> tuple[torch.Tensor, torch.Tensor]:
        """(stream + delta, product(norm of that))"""
        stream, normed = self.norm(stream, delta, norm)
        return stream, product(normed)

    def product(self, x, weight: torch.Tensor, bias: torch.Tensor | None = None, out=None) -> torch.Tensor:
        """out: where to write it; then there is no bias."""
        return linear(x, weight, bias) if out is None else torch.mm(x, weight.t(), out=out)

    def delta(self, x, product: PackedLinear) -> torch.Tensor:
        """product(x), which goes to the stream; this and swiglu_product may return parts, [parts, T, hidden], if their
        own ``norm`` adds them up."""
        return self.product(x, product.weight, product.bias)

    def swiglu_product(self, gate_up, product: PackedLinear) -> torch.Tensor:
        """product(silu(gate) * up), gate_up [T, 2 * intermediate] (Shazeer 2020)."""
        gate, up = gate_up.chunk(2, -1)
        return product(F.silu(gate) * up)

    def turn(self, qkv, layer, rope, cache, slots) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """q [T, heads, D], and k, v [T, kv_heads, D], normed (Qwen3) and turned by RoPE.

        layer: the decoder's Attention. cache, slots: where k and v will go; an implementation that
        writes them there itself, which it may if slots is not None, returns None for both.
        """
        heads, kv_heads = layer.heads, layer.kv_heads
        qkv = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
        qk, v = qkv.split((heads + kv_heads, kv_heads), 1)
        if layer.q_norm is not None:
            q, k = qk.split((heads, kv_heads), 1)
            qk = torch.cat((layer.q_norm(q), layer.k_norm(k)), 1)
        q, k = rotate(qk, *rope).split((heads, kv_heads), 1)
        return q, k, v
