"""logit_bias, allowed_token_ids and bad_words change single rows of logits."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from nanoengine.engine.sequence import Sequence
from nanoengine.packing import on_device


class _Tensors:
    """The options of one sequence on the device, made once.

    banned: bool [vocabulary], tokens that are never possible; None if there are none. words: {tokens
    that must stand last in the output: ids that are impossible then}; lengths: of these tokens.
    """

    def __init__(self, seq: Sequence, vocab_size: int, device: torch.device):
        p = seq.params
        self.bias_ids = self.bias = self.banned = None
        if p.logit_bias:
            self.bias_ids = on_device(list(p.logit_bias), torch.int64, device)
            self.bias = on_device(list(p.logit_bias.values()), torch.float32, device)
        alone = [word[0] for word in p.bad_words_ids if len(word) == 1]
        if p.allowed_token_ids is not None or alone:
            self.banned = torch.full(
                (vocab_size,), p.allowed_token_ids is not None, dtype=torch.bool, device=device
            )
            if p.allowed_token_ids is not None:
                allowed = on_device(list(p.allowed_token_ids), torch.int64, device)
                self.banned.index_fill_(0, allowed, False)
            if alone:
                self.banned.index_fill_(0, on_device(alone, torch.int64, device), True)
        self.words: dict[tuple[int, ...], list[int]] = {}
        for word in p.bad_words_ids:
            if len(word) > 1:
                self.words.setdefault(tuple(word[:-1]), []).append(word[-1])
        self.lengths = sorted({len(prefix) for prefix in self.words})

    def last_tokens(self, seq: Sequence) -> list[int]:
        """Ids that would complete a bad word now. Only generated tokens count."""
        found: list[int] = []
        for length in self.lengths:
            if length <= seq.num_output_tokens:
                found += self.words.get(tuple(seq.token_ids[-length:]), [])
        return found


def has_options(seq: Sequence) -> bool:
    p = seq.params
    return bool(p.logit_bias or p.bad_words_ids) or p.allowed_token_ids is not None


class LogitsProcessors:
    """Changes rows of logits in place; rows: places of the sequences that have such options."""

    def __init__(self) -> None:
        self._tensors: WeakKeyDictionary[Sequence, _Tensors] = WeakKeyDictionary()

    def add_bias(self, logits: torch.Tensor, seqs: list[Sequence], rows: list[int]) -> None:
        """Before penalties: the sign of a logit decides what repetition_penalty does to it."""
        for row in rows:
            tensors = self._tensors_of(seqs[row], logits)
            if tensors.bias is not None:
                logits[row].index_add_(0, tensors.bias_ids, tensors.bias)

    def ban(self, logits: torch.Tensor, seqs: list[Sequence], rows: list[int]) -> None:
        """After penalties: -inf must stay what it is."""
        for row in rows:
            tensors = self._tensors_of(seqs[row], logits)
            if tensors.banned is not None:
                logits[row].masked_fill_(tensors.banned, -torch.inf)
            last = tensors.last_tokens(seqs[row])
            if last:
                logits[row].index_fill_(0, on_device(last, torch.int64, logits.device), -torch.inf)

    def _tensors_of(self, seq: Sequence, logits: torch.Tensor) -> _Tensors:
        tensors = self._tensors.get(seq)
        if tensors is None:
            tensors = self._tensors[seq] = _Tensors(seq, logits.shape[-1], logits.device)
        return tensors
