"""A runner without a model that proves the paging right.

Like a transformer's KV, what it keeps of a token depends on the whole prefix, and the next token
depends on everything gathered *through the block table*. A wrong slot, a stale block, a false
cache hit or a wrong position therefore changes the output, and ``expected_output`` knows the
right one from the token ids alone.

    state[p] = state[p - 1] * A + token[p] + 1              what a slot keeps (A odd, mod 2**64)
    next     = mix(sum over p of state[p] * B**p) % vocabulary
"""

from __future__ import annotations

import numpy as np

from nanoengine.engine.batch import Batch
from nanoengine.engine.protocols import Pending, Runner
from nanoengine.engine.rows import SentBlocks, TableUpdate

_A, _B, _MASK = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 2**64 - 1
_A_INVERSE = pow(_A, -1, 2**64)


class _Powers:
    """base**0 .. base**(n - 1) mod 2**64, grown when needed."""

    def __init__(self, base: int):
        self.base, self.values = base, np.ones(1, np.uint64)

    def __call__(self, n: int) -> np.ndarray:
        while len(self.values) < n:
            step = np.uint64(pow(self.base, len(self.values), 2**64))
            self.values = np.concatenate((self.values, self.values * step))
        return self.values[:n]


class Done(Pending):
    """A result that is already there (or, given a function, is computed when it is asked for)."""

    def __init__(self, tokens):
        self._tokens = tokens

    def result(self) -> list[list[int]]:
        return self._tokens() if callable(self._tokens) else self._tokens


class SlotRunner(Runner):
    """num_blocks, block_size: its KV pool. vocab_size: new tokens lie in [0, vocab_size).

    Like a GPU it keeps, by request row, the block table and the last token of each sequence: a step
    is sent only what is new of them. hold_back: True does all work of a step only when its result
    is asked for, as a slow GPU would: what the engine changes meanwhile must not matter.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 1000, *, hold_back: bool = False):
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.hold_back = hold_back
        self.slots = np.zeros(num_blocks * block_size, np.uint64)
        self._a, self._a_inverse, self._b = _Powers(_A), _Powers(_A_INVERSE), _Powers(_B)
        self._sent = SentBlocks()
        self._tables: dict[int, list[int]] = {}  # by request row
        self._last_tokens: dict[int, int] = {}  # by request row

    def launch(self, batch: Batch) -> Done:
        updates = self._sent.updates(batch)
        if self.hold_back:
            return Done(lambda: self._receive_and_run(batch, updates))
        return Done(self._receive_and_run(batch, updates))

    def close(self) -> None:
        """Nothing to give back."""

    def _receive_and_run(self, batch: Batch, updates: list[TableUpdate]) -> list[list[int]]:
        for update in updates:
            table = self._tables.setdefault(update.row, [])
            table[update.start :] = update.blocks
        return self._run(batch)

    def _run(self, batch: Batch) -> list[list[int]]:
        tables = [self._tables[row] for row in batch.rows.tolist()]
        ids = batch.input_ids
        if batch.token_rows is not None:  # ids that the step before has sampled meanwhile
            ids = ids.copy()
            for t in np.flatnonzero(batch.token_rows >= 0):
                ids[t] = self._last_tokens[int(batch.token_rows[t])]
        starts = batch.query_starts
        # All KV of the step, then the tokens. A state needs the one before it, which another row of this step may
        # compute: one that starts earlier, so the rows are written in the order of their starts.
        for i in np.argsort(batch.context_lens - batch.query_lens, kind="stable").tolist():
            self._write(batch, i, tables[i], ids[starts[i] : starts[i + 1]], starts[i])
        tokens: list[list[int]] = [[] for _ in batch.seqs]
        for i in batch.sample_rows.tolist():
            tokens[i].append(self._sample(tables[i], int(batch.context_lens[i])))
            self._last_tokens[int(batch.rows[i])] = tokens[i][-1]
        return tokens

    def _gather(self, table: list[int], num_tokens: int) -> np.ndarray:
        blocks = np.array(table[: -(-num_tokens // self.block_size)], np.int64)
        return self.slots.reshape(self.num_blocks, self.block_size)[blocks].reshape(-1)[:num_tokens]

    def _write(self, batch: Batch, row: int, table: list[int], ids: np.ndarray, first: int) -> None:
        """Unroll state[p] = state[p - 1] * A + id + 1 over a span: state[k] = A**k * sum id / A**k."""
        n, start = len(ids), int(batch.context_lens[row]) - len(ids)
        before = self._gather(table, start)[-1] if start else np.uint64(0)
        terms = (ids.astype(np.uint64) + np.uint64(1)) * self._a_inverse(n + 1)[1:]
        states = self._a(n + 1)[1:] * (before + np.cumsum(terms, dtype=np.uint64))
        slots = batch.slot_mapping[first : first + n]
        written = slots >= 0  # the slot -1 of a padded row writes nowhere
        self.slots[slots[written]] = states[written]

    def _sample(self, table: list[int], num_tokens: int) -> int:
        states = self._gather(table, num_tokens)
        total = int(np.sum(states * self._b(num_tokens), dtype=np.uint64))
        return mix(total) % self.vocab_size


def mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): spreads all 64 bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def expected_output(
    prompt: list[int], max_new: int, vocab_size: int = 1000, *, end_token_ids=frozenset(), min_tokens: int = 0
) -> list[int]:
    """What SlotRunner must generate, computed from the tokens alone: no blocks, no batches, no numpy."""
    state, total, power = 0, 0, 1
    output: list[int] = []
    for token in prompt:
        state, total, power = _feed(token, state, total, power)
    while len(output) < max_new:
        token = mix(total) % vocab_size
        output.append(token)
        if token in end_token_ids and len(output) > min_tokens:
            break
        state, total, power = _feed(token, state, total, power)
    return output


def prefix_states(tokens: list[int]) -> list[int]:
    """What the slots of these tokens must hold, one number a token: the oracle of a KV block."""
    states, state, total, power = [], 0, 0, 1
    for token in tokens:
        state, total, power = _feed(token, state, total, power)
        states.append(state)
    return states


def _feed(token: int, state: int, total: int, power: int) -> tuple[int, int, int]:
    state = (state * _A + token + 1) & _MASK
    return state, (total + state * power) & _MASK, (power * _B) & _MASK
