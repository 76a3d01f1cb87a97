"""model.ops.TorchOps in fewer kernels: seven a layer for one token, nine for many."""

from __future__ import annotations

from nanoengine.kernels.gemv import fits, gemv, norm_gemv, swiglu_gemv
from nanoengine.kernels.norm import add_norm
from nanoengine.kernels.product import plan_product, product
from nanoengine.kernels.rope_store import rope_store
from nanoengine.kernels.swiglu import swiglu
from nanoengine.model.layers import PackedLinear
from nanoengine.model.ops import TorchOps


class TritonOps(TorchOps):
    """For one token a product reads each weight once and computes what comes before it by the way; for
    more, kernels.product or cuBLAS multiplies and the passes between are fused.

    parts: ``delta`` may come in parts, [parts, T, hidden], where that is faster; not where ranks add theirs up.
    """

    def __init__(self, parts: bool = False):
        self.parts = parts

    def rope(self, table, positions, dtype):
        return table, positions, dtype

    def norm(self, stream, delta, norm):
        return add_norm(stream, delta, norm.weight, norm.eps)

    def norm_product(self, stream, delta, norm, packed):
        if _is_for_gemv(stream, packed):
            return norm_gemv(stream, delta, norm.weight, norm.eps, packed.weight, packed.bias)
        stream, normed = self.norm(stream, delta, norm)
        return stream, self._multiply(normed, packed)

    def product(self, x, weight, bias=None, out=None):
        if len(x) == 1 and fits(weight):
            return gemv(x, weight, bias, out)
        tiles = plan_product(x, weight) if out is None else None
        return super().product(x, weight, bias, out) if tiles is None else product(x, weight, bias, tiles)

    def delta(self, x, packed):
        if _is_for_gemv(x, packed):
            return gemv(x, packed.weight, packed.bias)
        return self._multiply(x, packed, self.parts)

    def swiglu_product(self, gate_up, packed):
        if _is_for_gemv(gate_up, packed):
            return swiglu_gemv(gate_up, packed.weight, packed.bias)
        return self.delta(swiglu(gate_up), packed)

    def _multiply(self, x, packed, may_split: bool = False):
        tiles = plan_product(x, packed.weight, may_split) if _is_plain(packed) else None
        return packed(x) if tiles is None else product(x, packed.weight, packed.bias, tiles)

    def turn(self, qkv, layer, rope, cache, slots):
        table, positions, dtype = rope
        if slots is None:
            return super().turn(qkv, layer, table(positions, dtype), cache, None)
        norm = layer.q_norm is not None
        weights = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps) if norm else (None, None, 0.0)
        q = rope_store(qkv, layer.heads, *weights, table.cos, table.sin, positions, cache, slots)
        return q, None, None


def _is_for_gemv(x, packed) -> bool:
    return len(x) == 1 and _is_plain(packed) and fits(packed.weight)


def _is_plain(packed) -> bool:
    """False for a module of your own in its place (quantised, say): then what counts is its forward."""
    return type(packed) is PackedLinear
