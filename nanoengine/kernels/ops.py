"""model.ops.TorchOps in fewer kernels: seven a layer for one token, nine for many."""

from __future__ import annotations

from nanoengine.kernels.gemv import fits, gemv, norm_gemv, swiglu_gemv
from nanoengine.kernels.norm import add_norm
from nanoengine.kernels.rope_store import rope_store
from nanoengine.kernels.swiglu import swiglu
from nanoengine.model.ops import TorchOps


class TritonOps(TorchOps):
    """For one token a product reads each weight once and computes what comes before it by the way; for
    more, cuBLAS multiplies and the passes between are fused."""

    def rope(self, table, positions, dtype):
        return table, positions, dtype

    def norm(self, stream, delta, norm):
        return add_norm(stream, delta, norm.weight, norm.eps)

    def norm_product(self, stream, delta, norm, product):
        if len(stream) == 1 and fits(product.weight):
            return norm_gemv(stream, delta, norm.weight, norm.eps, product.weight, product.bias)
        return super().norm_product(stream, delta, norm, product)

    def product(self, x, weight, bias=None, out=None):
        if len(x) == 1 and fits(weight):
            return gemv(x, weight, bias, out)
        return super().product(x, weight, bias, out)

    def swiglu_product(self, gate_up, product):
        if len(gate_up) == 1 and fits(product.weight):
            return swiglu_gemv(gate_up, product.weight, product.bias)
        return product(swiglu(gate_up))

    def turn(self, qkv, layer, rope, cache, slots):
        table, positions, dtype = rope
        if slots is None:
            return super().turn(qkv, layer, table(positions, dtype), cache, None)
        norm = layer.q_norm is not None
        weights = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps) if norm else (None, None, 0.0)
        q = rope_store(qkv, layer.heads, *weights, table.cos, table.sin, positions, cache, slots)
        return q, None, None
