"""Attention over a paged KV cache: one protocol, one implementation a file."""

from nanoengine.attention.base import AttentionBackend, choose_backend

__all__ = ["AttentionBackend", "choose_backend"]
