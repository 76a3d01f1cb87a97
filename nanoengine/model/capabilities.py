"""What may be done with a module: its class declares it, and the one rule of who inherits that.

``fusable``: kernels may compute in place of its methods (model.fused does that).
``supports_cuda_graphs``: a step may be recorded once and replayed without calling its methods.

A class that overrides one of the methods that a capability speaks for has ways of its own, so the
capability is off unless the class declares it itself. A layer, a linear layer or a decoder of your
own is therefore run as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn


class Declares:
    """Mixed into a module. ``speaks_for``: by capability, the methods whose ways it describes.

    plain: of a fused class, the class in whose place it stands; None of all others.
    """

    speaks_for: ClassVar[Mapping[str, tuple[str, ...]]] = {"fusable": ("forward",)}
    fusable = False
    supports_cuda_graphs = False
    plain: ClassVar[type | None] = None

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        for capability, methods in cls.speaks_for.items():
            if capability not in own and any(method in own for method in methods):
                setattr(cls, capability, False)


def declares(module: nn.Module, capability: str) -> bool:
    """True if the module's class declares it and no method was replaced on the module itself."""
    if not isinstance(module, Declares) or not getattr(module, capability):
        return False
    return not any(method in vars(module) for method in module.speaks_for[capability])


def supports_cuda_graphs(decoder: nn.Module) -> bool:
    """True if the decoder's steps may be recorded.

    In a recorded decode step a kernel looks up the embedding, in the place of embed_tokens.
    """
    ours = declares(decoder, "supports_cuda_graphs")
    return ours and declares(decoder.embed_tokens, "fusable")


def is_fused(module: nn.Module | None) -> bool:
    return isinstance(module, Declares) and module.plain is not None


def unfuse(decoder: nn.Module) -> None:
    """Undo model.fused.fuse: every module gets its plain class back. Needs no triton."""
    for module in decoder.modules():
        if is_fused(module):
            module.__class__ = module.plain
