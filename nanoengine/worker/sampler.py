"""From logits to tokens: logit bias, penalties, bans, temperature, top-k, top-p, min-p, and a reproducible draw.

The draw is an exponential race: with independent e_i ~ Exp(1), argmax p_i / e_i has distribution p.
In logarithms that is argmax(logit_i - log e_i). The e_i are a hash of (seed, position, token id), so
a request's random numbers depend on nothing else: not on batch mates, chunks, or preemptions.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch

from nanoengine.engine.protocols import NO_TOKEN, NON_FINITE
from nanoengine.engine.sequence import Sequence
from nanoengine.kernels.gumbel_noise import gumbel_noise, signed
from nanoengine.model.capabilities import Declares
from nanoengine.packing import on_device, upload
from nanoengine.worker.logits_processors import LogitsProcessors, has_options

MOST = 3e38  # of a score: penalties and temperature turn no finite logit into an infinite one


class _Rows:
    """The sampling options of these rows as tensors: built anew only when the rows change."""

    def __init__(self, seqs: list[Sequence], device: torch.device):
        self.seqs, params = list(seqs), [seq.params for seq in seqs]

        def column(name: str, dtype=torch.float32) -> torch.Tensor:
            return on_device([getattr(p, name) for p in params], dtype, device)[:, None]

        self.sampled = [i for i, p in enumerate(params) if p.temperature > 0]
        self.all_sampled = len(self.sampled) == len(seqs)
        self.index = on_device(self.sampled, torch.int64, device)
        self.temperature = column("temperature")
        self.top_k, self.top_p, self.min_p = column("top_k", torch.int64), column("top_p"), column("min_p")
        self.truncated = [
            i for i, p in enumerate(params) if p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p > 0)
        ]
        self.truncated_index = on_device(self.truncated, torch.int64, device)
        self.seeds = on_device([signed(seq.seed % 2**64) for seq in seqs], torch.int64, device)
        self.penalised = [i for i, p in enumerate(params) if p.has_penalties]
        self.processed = [i for i, seq in enumerate(seqs) if has_options(seq)]
        self.held = [i for i, p in enumerate(params) if p.min_tokens]


class _History:
    """Which tokens a sequence has seen, and how often it generated each: grown by its new tokens only."""

    def __init__(self, vocab_size: int, device: torch.device):
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.num_read = 0

    def update(self, seq: Sequence) -> None:
        new = on_device(seq.token_ids[self.num_read :], torch.int64, self.seen.device)
        self.seen[new] = True
        generated = new[max(0, seq.num_prompt_tokens - self.num_read) :]
        self.counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.float32))
        self.num_read = len(seq.token_ids)


class Sampler(Declares):
    """Call with float32 logits [S, vocabulary], the S sequences, and the int64 positions [S] to fill.

    fusable: where temperature is all that is asked for, a kernel may sample in its place.
    """

    speaks_for = {"fusable": ("__call__", "_choose", "_draw", "_penalise", "_hold_ends")}
    fusable = True

    supports = frozenset({"logit_bias", "allowed_token_ids", "bad_words"})  # engine.admission.RUNNER_OPTIONS

    def __init__(self) -> None:
        self._rows: _Rows | None = None
        self._processors = LogitsProcessors()
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()

    def __call__(self, logits: torch.Tensor, seqs: list[Sequence], positions: np.ndarray) -> torch.Tensor:
        """int64 [S]: the next token of each row, or NO_TOKEN. ``logits`` may be changed in place."""
        rows = self._rows_of(seqs, logits.device)
        self._processors.add_bias(logits, rows.seqs, rows.processed)
        self._penalise(logits, rows)
        self._processors.ban(logits, rows.seqs, rows.processed)
        self._hold_ends(logits, rows, positions)
        none_left = logits.amax(-1) == -torch.inf  # after all masks
        return self._choose(logits, rows, positions).masked_fill(none_left, NO_TOKEN)

    def _choose(self, logits: torch.Tensor, rows: _Rows, positions: np.ndarray) -> torch.Tensor:
        greedy = None if rows.all_sampled else logits.argmax(-1)
        if not rows.sampled:
            return greedy
        drawn = self._draw(logits, rows, positions)
        return drawn if rows.all_sampled else greedy.index_copy_(0, rows.index, drawn)

    def _rows_of(self, seqs: list[Sequence], device: torch.device) -> _Rows:
        if self._rows is None or self._rows.seqs != seqs:  # a list compare by identity: cheap
            self._rows = _Rows(seqs, device)
        return self._rows

    def _penalise(self, logits: torch.Tensor, rows: _Rows) -> None:
        for i in rows.penalised:
            seq = rows.seqs[i]
            history = self._histories.get(seq)
            if history is None:
                history = self._histories[seq] = _History(logits.shape[-1], logits.device)
            history.update(seq)
            row, p = logits[i], seq.params
            if p.repetition_penalty != 1.0:
                scaled = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
                row = torch.where(history.seen, scaled, row)
            row = row - p.frequency_penalty * history.counts - p.presence_penalty * (history.counts > 0)
            logits[i] = torch.where(logits[i].isfinite(), row.clamp_(-MOST, MOST), logits[i])

    def _hold_ends(self, logits: torch.Tensor, rows: _Rows, positions: np.ndarray) -> None:
        """No end token before min_tokens tokens are generated."""
        for i in rows.held:
            seq = rows.seqs[i]
            if positions[i] - seq.num_prompt_tokens < seq.params.min_tokens and seq.end_token_ids:
                known = [token for token in seq.end_token_ids if token < logits.shape[-1]]
                ends = on_device(known, torch.int64, logits.device)
                logits[i].index_fill_(0, ends, -torch.inf)

    def _draw(self, logits: torch.Tensor, rows: _Rows, positions: np.ndarray) -> torch.Tensor:
        scores = (logits / rows.temperature.clamp(min=1e-6)).clamp_(max=MOST)
        if rows.truncated:
            i = rows.truncated_index
            scores[i] = truncate(scores[i], rows.top_k[i], rows.top_p[i], rows.min_p[i])
        seeds, places = rows.seeds, upload([positions], logits.device)[0]
        if not rows.all_sampled:
            scores, seeds, places = scores[rows.index], seeds[rows.index], places[rows.index]
        return (scores + gumbel_noise(seeds, places, logits.shape[-1])).argmax(-1)


def judged(tokens: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """``tokens`` [S], with NON_FINITE where the logits hold NaN or +inf, NO_TOKEN where only -inf.

    highest: ``logits.amax(-1)``, which keeps a NaN. Nothing here waits for a GPU.
    """
    tokens = tokens.masked_fill(highest == -torch.inf, NO_TOKEN)
    return tokens.masked_fill(~(highest < torch.inf), NON_FINITE)


def report_logprobs(
    logits: torch.Tensor, seqs: list[Sequence], tokens: torch.Tensor
) -> list[dict[int, float]] | None:
    """For each row that asks: {token: natural-log probability} of the likeliest and the chosen token.

    ``logits`` are the model's own, before penalties, temperature and truncation. None if no row asks.
    What it says of a row without a token (a negative one) means nothing.
    """
    asking = [i for i, seq in enumerate(seqs) if seq.params.logprobs is not None]
    if not asking:
        return None
    index = torch.tensor(asking, device=logits.device)
    scores = logits[index].float().log_softmax(-1)
    most = max(seqs[i].params.logprobs for i in asking)
    values, ids = scores.topk(min(most, scores.shape[-1]))
    chosen = tokens[index].clamp(0, scores.shape[-1] - 1)
    own = scores.gather(1, chosen[:, None])[:, 0]
    result: list[dict[int, float]] = [{} for _ in seqs]
    for i, row_ids, row_values, token, value in zip(
        asking, ids.tolist(), values.tolist(), chosen.tolist(), own.tolist(), strict=True
    ):
        wanted = seqs[i].params.logprobs
        result[i] = dict(zip(row_ids[:wanted], row_values[:wanted], strict=True)) | {token: value}
    return result


def truncate(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set scores [S, V] outside the kept set to -inf. top_k (0 keeps all), top_p, min_p: [S, 1].

    top_k first; top_p counts probabilities renormalised over what top_k kept, and keeps the token
    that crosses the threshold; min_p is relative to the likeliest token. One token always stays.
    """
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    keep = (ranks < top_k) | (top_k == 0)
    probs = values.masked_fill(~keep, -torch.inf).softmax(-1)
    before = probs.cumsum(-1) - probs
    keep &= (before < top_p) | (top_p >= 1)  # rounded sums pass 1 before the last token
    keep &= probs >= min_p * probs[:, :1]
    keep[:, 0] = True
    return torch.full_like(scores, -torch.inf).scatter_(-1, order, values.masked_fill(~keep, -torch.inf))
