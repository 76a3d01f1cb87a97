"""The same modules in fewer kernels: seven launches per layer for one token, nine for many.

``fuse`` puts them in place once, when a runner has loaded the model. A fused class computes what
the class that it derives from computes, from the same parameters; only which kernel does it
differs. The plain classes in ``decoder`` and ``layers`` are the reference. Needs triton.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from nanoengine.kernels.contract import LinearTensors, ModelTensors
from nanoengine.kernels.gemv import fits_gemv, gemv, rms_norm_gemv, silu_and_mul_gemv
from nanoengine.kernels.rms_norm import fused_add_rms_norm
from nanoengine.kernels.rope_store import rope_store
from nanoengine.kernels.silu_and_mul import silu_and_mul
from nanoengine.kernels.split_k_gemm import plan_gemm, split_k_gemm
from nanoengine.model.capabilities import declares, is_fused, unfuse
from nanoengine.model.decoder import MLP, Attention, Decoder, DecoderLayer
from nanoengine.model.layers import (
    AddRMSNorm,
    PackedLinear,
    ParallelLMHead,
    RowParallelLinear,
    linear,
)

log = logging.getLogger(__name__)


def matmul(x, weight, bias=None, may_split: bool = False) -> torch.Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out].

    For one token gemv, for a few the split-K kernel, else cuBLAS. may_split: the result may come as
    split-K partials [S, T, out], to be added up.
    """
    if len(x) == 1 and fits_gemv(weight):
        return gemv(x, weight, bias)
    config = plan_gemm(x, weight, may_split)
    return linear(x, weight, bias) if config is None else split_k_gemm(x, weight, bias, config)


class FusedAddRMSNorm(AddRMSNorm):
    """Changes the residual in place. hidden may be split-K partials [S, T, hidden_size]."""

    plain = AddRMSNorm

    def forward(self, hidden, residual=None):
        return fused_add_rms_norm(hidden, residual, self.weight, self.eps)


class FusedPackedLinear(PackedLinear):
    plain = PackedLinear

    def forward(self, x):
        return matmul(x, self.weight, self.bias)

    def after_norm(self, norm: AddRMSNorm, hidden, residual) -> tuple[torch.Tensor, torch.Tensor]:
        """(this layer's output for norm(hidden + residual), hidden + residual)"""
        weight, bias = self.weight, self.bias
        if hidden.shape[-2] == 1 and fits_gemv(weight):
            return rms_norm_gemv(hidden, residual, norm.weight, norm.eps, weight, bias)
        normed, residual = fused_add_rms_norm(hidden, residual, norm.weight, norm.eps)
        return matmul(normed, weight, bias), residual


class FusedRowParallelLinear(RowParallelLinear):
    """split_k: may hand split-K partials to the next norm; not where ranks all-reduce."""

    plain = RowParallelLinear
    split_k = False

    def forward(self, x):
        return self.all_reduce(matmul(x, self.weight, self.bias))

    def before_norm(self, x):
        """[T, out], or split-K partials [S, T, out]."""
        return self.all_reduce(matmul(x, self.weight, self.bias, self.split_k))

    def after_silu_and_mul(self, gate_up):
        """before_norm of silu(gate) * up. gate_up: [T, 2 * in]."""
        if len(gate_up) == 1 and fits_gemv(self.weight):
            return self.all_reduce(silu_and_mul_gemv(gate_up, self.weight, self.bias))
        return self.before_norm(silu_and_mul(gate_up))


class FusedLMHead(ParallelLMHead):
    plain = ParallelLMHead

    def matmul(self, hidden, out=None):
        if len(hidden) == 1 and fits_gemv(self.weight):
            return gemv(hidden, self.weight, out=out)
        return matmul(hidden, self.weight) if out is None else super().matmul(hidden, out)


class FusedAttention(Attention):
    """One kernel norms q and k, rotates them, and writes k and v to the cache."""

    plain = Attention

    def split_heads(self, qkv, ctx):
        """k and v are None where they are in the cache already; the backend finds them there."""
        if not ctx.reads_stored:
            return super().split_heads(qkv, ctx)
        q_norm, k_norm, rope = self.q_norm, self.k_norm, ctx.rotary_emb
        norms = (None, None, 0.0) if q_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
        slots = ctx.metadata.slot_mapping
        q = rope_store(
            qkv, self.num_heads, *norms, rope.cos, rope.sin, ctx.positions, ctx.kv_cache, slots
        )
        return q, None, None


class FusedMLP(MLP):
    plain = MLP

    def forward(self, hidden):
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))


class FusedDecoderLayer(DecoderLayer):
    """Norms are computed with the matmul after them, and split-K partials go to the next norm."""

    plain = DecoderLayer

    def forward(self, hidden, residual, ctx):
        attn, mlp = self.self_attn, self.mlp
        qkv, residual = attn.qkv_proj.after_norm(self.input_layernorm, hidden, residual)
        q, k, v = attn.split_heads(qkv, ctx)
        out = ctx.attention(q, k, v, ctx.kv_cache, ctx.metadata, attn.scaling)
        hidden = attn.o_proj.before_norm(out.flatten(1))
        norm = self.post_attention_layernorm
        gate_up, residual = mlp.gate_up_proj.after_norm(norm, hidden, residual)
        return mlp.down_proj.after_silu_and_mul(gate_up), residual


FUSED = {
    AddRMSNorm: FusedAddRMSNorm,
    PackedLinear: FusedPackedLinear,
    RowParallelLinear: FusedRowParallelLinear,
    ParallelLMHead: FusedLMHead,
    Attention: FusedAttention,
    MLP: FusedMLP,
    DecoderLayer: FusedDecoderLayer,
}


@dataclass
class Fusion:
    """What ``fuse`` did, by names of modules. left: those of your own, which stay as they are.

    split_k: linear layers may hand split-K partials to the next norm.
    """

    fused: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    split_k: bool = False


def fuse(decoder: Decoder) -> Fusion:
    """Let kernels compute what the decoder's modules declare fusable. Calling it again starts over.

    A module keeps its parameters, its place and its identity; its class becomes the fused one. A
    module of your own stays as it is (model.capabilities has the rule), and so do those whose fused
    variant would not fit to it: norms in a layer of your own, which may not expect that the
    residual changes in place; attention beside a q_norm or rotary_emb of your own; and a layer in
    which anything is left, whose parts are then fused one by one. A module that is put in place
    later is not fused: call this again.
    """
    unfuse(decoder)
    done, modules = Fusion(), dict(decoder.named_modules())
    for name, module in reversed(modules.items()):  # what is inside comes first
        owner = modules[name.rpartition(".")[0]]
        fused = next((FUSED[kind] for kind in FUSED if isinstance(module, kind)), None)
        if fused is not None and _may_fuse(module, owner, decoder):
            module.__class__ = _in_place_of(type(module), fused)
            done.fused.append(name)
    # the norm that adds a layer's partials is the next layer's, or the decoder's
    whole = [decoder.norm, *decoder.layers]
    done.split_k = all(map(is_fused, whole)) and decoder.lm_head.group is None
    for module in modules.values():
        if isinstance(module, FusedRowParallelLinear):
            module.split_k = done.split_k
    done.left = [name for name, module in modules.items() if _is_left(name, module, modules)]
    log.info("fused %d modules; run as they are: %s", len(done.fused), done.left or "none")
    return done


def _may_fuse(module, owner, decoder: Decoder) -> bool:
    if not declares(module, "fusable"):
        return False
    if isinstance(module, AddRMSNorm):
        return declares(owner, "fusable")
    if isinstance(module, Attention):
        parts = (module.q_norm, module.k_norm, decoder.rotary_emb)
        return all(part is None or declares(part, "fusable") for part in parts)
    if isinstance(module, DecoderLayer):
        attn, mlp = module.self_attn, module.mlp
        parts = [module.input_layernorm, attn, module.post_attention_layernorm, mlp]
        if not all(map(is_fused, parts)):
            return False
        linears = (attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj)
        return all(map(is_fused, linears))
    return True


@cache
def _in_place_of(plain: type, fused: type) -> type:
    """The fused class; for a subclass of the plain one that overrides nothing, one of both."""
    if plain is fused.__base__:
        return fused
    return type(f"Fused{plain.__name__}", (fused, plain), {"plain": plain})


def _is_left(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> bool:
    """True for the outermost module that has ways of its own."""

    def own(module: nn.Module) -> bool:
        ours = isinstance(module, nn.ModuleList) or is_fused(module)
        return not ours and not declares(module, "fusable")

    return own(module) and (not name or not own(modules[name.rpartition(".")[0]]))


def model_tensors(decoder: Decoder, block_size: int) -> ModelTensors:
    """What the kernels' warm-up needs to know of a fused decoder."""
    config, rope, lm_head = decoder.config, decoder.rotary_emb, decoder.lm_head
    layer = next((layer for layer in decoder.layers if isinstance(layer, FusedDecoderLayer)), None)
    linears = {}
    if is_fused(lm_head):
        linears["lm_head"] = LinearTensors(lm_head.weight, None)
    if layer is not None:
        attn, mlp = layer.self_attn, layer.mlp
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            module = getattr(attn if name in ("qkv_proj", "o_proj") else mlp, name)
            linears[name] = LinearTensors(module.weight, module.bias)
        linears |= {"norm": layer.input_layernorm.weight, "split_k": mlp.down_proj.split_k}
        if attn.q_norm is not None:
            linears["q_norm"], linears["k_norm"] = attn.q_norm.weight, attn.k_norm.weight
    return ModelTensors(
        embed_tokens=decoder.embed_tokens.weight,
        vocab_size=decoder.vocab_size,
        eps=config.rms_norm_eps,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        cos=rope.cos,
        sin=rope.sin,
        **linears,
    )
