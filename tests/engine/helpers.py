"""Small things that several tests of the control plane share."""

from __future__ import annotations

import numpy as np

from nanoengine.config import EngineConfig
from nanoengine.engine.block_manager import ROOT, BlockManager, chain_hash
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.sequence import Sequence
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import SlotRunner, expected_output
from nanoengine.sim.slot_runner import _B, _MASK, _feed, mix, prefix_states

VOCAB = 50


def sequence(tokens, seq_id: int = 0, **kwargs) -> Sequence:
    """A Sequence as admission would make it, without the checks."""
    kwargs.setdefault("max_total_tokens", 10**9)
    return Sequence(seq_id, list(tokens), kwargs.pop("params", SamplingParams()), **kwargs)


def engine(num_blocks: int = 64, block_size: int = 4, *, hold_back: bool = False, **kwargs) -> LLMEngine:
    """An engine on SlotRunner; keywords of LLMEngine go there, all others to EngineConfig."""
    parts = {k: kwargs.pop(k) for k in ("runner", "block_manager", "scheduler", "observer") if k in kwargs}
    kwargs.setdefault("vocab_size", VOCAB)
    runner = parts.pop("runner", None) or SlotRunner(num_blocks, block_size, kwargs["vocab_size"], hold_back=hold_back)
    return LLMEngine(EngineConfig(**kwargs), runner=runner, **parts)


def finish(eng: LLMEngine, max_steps: int = 20_000) -> list:
    """Step until nothing is left, with the laws of the pool checked after each step."""
    outputs = []
    for _ in range(max_steps):
        if not eng.has_unfinished():
            return outputs
        outputs.append(eng.step())
        eng.block_manager.check_invariants(eng.sequences.values() if not eng.in_flight else holders(eng))
    raise AssertionError(f"still unfinished after {max_steps} steps: {list(eng.sequences.values())}")


def holders(eng: LLMEngine) -> list[Sequence]:
    """All sequences that may hold blocks: unfinished ones, and ended ones with a step in flight."""
    seqs = dict.fromkeys(eng.sequences.values())
    for step in eng.in_flight:
        seqs.update(dict.fromkeys(step.batch.seqs))
    return [seq for seq in seqs if seq.block_table]


def assert_right(eng: LLMEngine, seq: Sequence) -> None:
    """The finished sequence has the one right output, by the oracle that knows no blocks."""
    want, reason = oracle(eng, seq.token_ids[: seq.num_prompt_tokens], seq.params)
    assert (seq.output_ids, seq.finish_reason) == (want, reason), seq


def oracle(eng: LLMEngine, prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
    """Right output and finish_reason, from the request and the sizes alone."""
    config, runner = eng.config, eng.runner
    room = min(config.max_model_len, runner.num_blocks * runner.block_size + 1) - len(prompt)
    if params.max_tokens is not None:
        room = min(room, params.max_tokens)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(config.eos_token_ids))
    want = expected_output(prompt, room, config.vocab_size, end_token_ids=ends, min_tokens=params.min_tokens)
    stopped = want[-1] in ends and len(want) > params.min_tokens
    return want, "stop" if stopped else "length"


def assert_empty(eng: LLMEngine) -> None:
    """Nothing queued, nothing held."""
    assert not eng.has_unfinished()
    assert not eng.scheduler.waiting and not eng.scheduler.running
    assert eng.block_manager.num_free_blocks == eng.block_manager.num_blocks
    eng.block_manager.check_invariants([])


def check_cached_kv(manager: BlockManager, runner: SlotRunner, not_yet: set[int] = frozenset()) -> None:
    """Each findable block, but those that a step in flight will write (``not_yet``), holds what its prefix says."""
    known = {content.content_id: content for content in manager._contents.values()}
    slots = runner.slots.reshape(manager.num_blocks, manager.block_size)
    for content in known.values():
        chain = [content]
        while chain[-1].parent_id in known:
            chain.append(known[chain[-1].parent_id])
        if chain[-1].parent_id != ROOT:
            continue  # its parent was evicted: nobody gets here
        tokens = np.concatenate([np.frombuffer(c.tokens[-8 * manager.block_size :], np.int64) for c in reversed(chain)])
        right = prefix_states(tokens.tolist())[-manager.block_size :]
        for block in set(content.blocks) - not_yet:
            assert slots[block].tolist() == right, f"block {block} is findable, but another prefix's, or not written"


def check_salts(manager: BlockManager, sequences) -> None:
    """No sequence holds a block that was registered under another salt."""
    for seq in sequences:
        content = manager._content_of[seq.block_table[0]]
        if content is not None:
            salt = content.tokens[: -8 * manager.block_size].decode("utf-8", "surrogatepass")
            assert salt == (seq.cache_salt or ""), seq


def constant_hash(parent_key: int, tokens: bytes) -> int:
    """Everything collides."""
    return 5


def two_bit_hash(parent_key: int, tokens: bytes) -> int:
    """Most things collide, in a block and in its parent."""
    return chain_hash(parent_key, tokens) % 4


class Counting:
    """A hash function that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, parent_key: int, tokens: bytes) -> int:
        self.calls += 1
        return chain_hash(parent_key, tokens)


def cached(manager: BlockManager, tokens, num_written: int | None = None, seq_id: int = 0, **kwargs) -> Sequence:
    """A sequence that went through ``manager``: allocated, computed and committed; still holding its blocks."""
    seq = sequence(tokens, seq_id, **kwargs)
    manager.allocate(seq, manager.lookup(seq))
    seq.num_computed_tokens = len(seq.token_ids) if num_written is None else num_written
    manager.commit(seq, seq.num_computed_tokens)
    return seq


class Recorder(SlotRunner):
    """Keeps of each batch, row by row: (seq_id, tokens computed, whether it samples)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps: list[list[tuple[int, int, bool]]] = []

    def launch(self, batch):
        lens = batch.query_lens.tolist()
        sampled = set(batch.sample_rows.tolist())
        self.steps.append(
            [(s.seq_id, n, row in sampled) for row, (s, n) in enumerate(zip(batch.seqs, lens, strict=True))]
        )
        return super().launch(batch)


def recorded(num_blocks, block_size, **kwargs):
    return engine(runner=Recorder(num_blocks, block_size, 50), **kwargs)


class Drafting(SlotRunner):
    """Brings 1 to ``most`` right ids a row, as if drafts were accepted, and writes the KV of none.

    They follow from what the row's slots hold: wrong KV gives wrong ids here, too.
    """

    def __init__(self, *args, rng=None, most: int = 1, **kwargs):
        super().__init__(*args, **kwargs)
        self.rng, self.most = rng, most
        self.num_extra = 0

    def _run(self, batch):
        results = super()._run(batch)
        for row in batch.sample_rows.tolist():
            table, context = batch.block_tables[row], int(batch.context_lens[row])
            results[row] += self._following(table, context, results[row][0])
        return results

    def extra(self) -> int:
        return self.rng.randint(0, self.most - 1)

    def _following(self, table, num_tokens: int, token: int) -> list[int]:
        states, ids = self._gather(table, num_tokens), []
        total, power = int((states * self._b(num_tokens)).sum()), pow(_B, num_tokens, _MASK + 1)
        state = int(states[-1])
        for _ in range(self.extra() if self.most > 1 else 0):
            state, total, power = _feed(token, state, total, power)
            token = mix(total) % self.vocab_size
            ids.append(token)
        self.num_extra += len(ids)
        return ids


def add(eng, prompt, max_tokens=8, **kwargs):
    return eng.add_request(prompt, SamplingParams(max_tokens=max_tokens, **kwargs))


def done(eng, seqs):
    finish(eng)
    for seq in seqs:
        assert_right(eng, seq)
    assert_empty(eng)
