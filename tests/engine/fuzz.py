"""Random life of an engine on SlotRunner, every step checked, every output compared with the oracle.

One scenario is one engine with random sizes and a random stream of arrivals and aborts; a runner
that may hold its results back and may fail; observers that abort or fail. All from one seed.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from nanoengine.config import EngineConfig
from nanoengine.engine.block_manager import BlockManager, chain_hash
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.scheduler import TokenBudgetScheduler
from nanoengine.sampling_params import SamplingParams
from nanoengine.trace import Trace

from .helpers import (
    Drafting,
    assert_empty,
    check_cached_kv,
    check_salts,
    constant_hash,
    holders,
    oracle,
    two_bit_hash,
)

VOCAB = 31


class Broken(Exception):
    """What a part of the engine raises on purpose."""


class MoodyRunner(Drafting):
    """Fails now and then, at launch or at result; a failure leaves garbage in its whole pool."""

    def __init__(self, rng: random.Random, rate: float, *args, **kwargs):
        super().__init__(*args, rng=rng, **kwargs)
        self.rate, self.batches = rate, []
        self.failures_left = 12  # or a long prompt in small chunks would never get through

    def _maybe_fail(self, where: str) -> None:
        if self.failures_left and self.rng.random() < self.rate:
            self.failures_left -= 1
            self.slots[:] = self.rng.getrandbits(64)
            raise self.rng.choice([Broken, KeyboardInterrupt])(where)

    def launch(self, batch):
        self._maybe_fail("launch")
        prefills = [seq.num_computed_tokens < seq.num_prefill_tokens for seq in batch.seqs]
        mixed = int(batch.query_lens[prefills].sum()) if not all(prefills) else 0
        self.batches.append((len(batch.seqs), len(batch.input_ids), mixed))
        return super().launch(batch)

    def _run(self, batch):
        self._maybe_fail("result" if self.hold_back else "launch")
        return super()._run(batch)


class SmallChunks(TokenBudgetScheduler):
    """A policy of one's own: prompts in chunks of 3, so that rows that sample nothing stand before others.

    What it takes back may be in the prefix cache already, so it goes without one.
    """

    def schedule(self):
        plan = super().schedule()
        for seq in plan.seqs:
            seq.num_scheduled_tokens = min(seq.num_scheduled_tokens, 3)
        return plan


class LastFirst(TokenBudgetScheduler):
    """Rows in reverse: who shares blocks of the same step stands before who computes them."""

    def schedule(self):
        plan = super().schedule()
        plan.seqs.reverse()
        return plan


class MoodyObserver:
    """Aborts requests and raises, before launch and after landing."""

    def __init__(self, rng: random.Random):
        self.rng, self.failures_left = rng, 12

    def before(self, engine, plan, batch):
        self._act(engine)
        return {}

    def after(self, engine, step, output) -> None:
        self._act(engine)

    def _act(self, engine) -> None:
        mood = self.rng.random()
        if mood < 0.02 and engine.sequences:
            engine.abort(self.rng.choice(list(engine.sequences.values())))
        elif mood > 0.99 and self.failures_left:
            self.failures_left -= 1
            raise Broken("observer")


class Scenario:
    """See the module. ``run`` returns what was counted: steps, requests, finish reasons, preemptions, ..."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.count: Counter = Counter()
        size = rng.choice([1, 1, 2, 3, 4, 5, 8, 16, 64, 255, 256])
        blocks = rng.randint(1, 5) if size > 60 else rng.randint(1, 2 + 100 // size)
        failing = rng.random() < 0.3
        self.crowded = size < 60 and rng.random() < 0.5  # short prompts, long answers: preemptions
        self.config = EngineConfig(
            max_num_seqs=rng.randint(5, 8) if self.crowded else rng.randint(1, 8),
            max_num_batched_tokens=rng.choice([17, 40, 400] if size > 60 else [1, 3, 10, 40, 100]),
            max_model_len=rng.choice([5, 40, 90, 200, 1100]),
            policy=rng.choice(["token_budget", "prefill_first"]),
            max_mixed_prefill_tokens=rng.choice([None, None, 1, 2, 16, 10**6]),
            overlap=rng.randint(0, 1),
            watermark=0 if self.crowded else rng.choice([0, 0.1, 0.5]),
            vocab_size=VOCAB,
            eos_token_ids=rng.choice([(), (), (1,), (1, 4)]),
        )
        self.runner = MoodyRunner(
            rng, 0.02 * failing, blocks, size, VOCAB,
            hold_back=rng.random() < 0.5, most=rng.choice([1, 1, 2, 6]),
        )  # fmt: skip
        scheduler = rng.choice([None, None, None, LastFirst])
        if size < 60 and rng.random() < 0.2:
            scheduler = SmallChunks
        manager = BlockManager(
            blocks, size, enable_prefix_caching=scheduler is not SmallChunks and rng.random() < 0.85,
            hash_function=rng.choice([chain_hash, chain_hash, two_bit_hash, constant_hash]),
        )  # fmt: skip
        observer = MoodyObserver(rng) if failing else rng.choice([None, Trace()])
        self.engine = LLMEngine(
            self.config, runner=self.runner, block_manager=manager, scheduler=scheduler, observer=observer
        )
        self.requests: list = []
        self.arrived = 0
        self.rate = 1.0 if self.crowded else rng.choice([0.1, 0.5, 1.0])

    def run(self, num_requests: int = 25, max_steps: int = 20_000) -> Counter:
        engine = self.engine
        while self.arrived < num_requests or engine.has_unfinished():
            if self.arrived < num_requests and self.rng.random() < self.rate:
                for _ in range(self.rng.choice([1, 1, 2, 4])):  # several at once: they start in one step
                    self._arrive()
            if self.rng.random() < 0.02 and self.requests:
                engine.abort(self.rng.choice(self.requests)[0])
            self._step()
            self.count["steps"] += 1
            assert self.count["steps"] < max_steps, "no progress"
        self._check_end()
        return self.count

    def _arrive(self) -> None:
        self.arrived += 1
        rng, long = self.rng, self.runner.block_size if self.runner.block_size > 60 else 0
        if long and rng.random() < 0.8:  # prompts around a multiple of a large block
            prompt = [rng.randint(0, 1)] * (long * rng.randint(1, 2) + rng.randint(-2, 2))
        else:
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 5 if self.crowded else 20))]
        if self.requests and rng.random() < 0.4:  # the same once more, or longer, or less of it
            _, prompt = rng.choice(self.requests[-4:])
            longer, shorter = prompt + [rng.randint(0, 1)] * rng.randint(1, 4), prompt[: len(prompt) // 2 + 1]
            prompt = rng.choice([prompt, longer, shorter])
        max_tokens = (
            rng.randint(10, 50) if self.crowded else rng.choice([1, rng.randint(1, 10), rng.randint(10, 50), None])
        )
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens or 5) if rng.random() < 0.3 else 0,
            stop_token_ids=[rng.randint(0, VOCAB - 1)] if rng.random() < 0.2 else [],
            ignore_eos=rng.random() < 0.3,
            presence_penalty=rng.choice([0, 0, 0, 1]),  # means no more here than: land first
        )
        pool = self.runner.num_blocks * self.runner.block_size
        served = len(prompt) < self.config.max_model_len and len(prompt) <= pool
        try:
            salt = rng.choice([None, None, None, "a", "b"])
            seq = self.engine.add_request(iter(prompt), params, cache_salt=salt)
        except ValueError:
            assert not served
            self.count["refused"] += 1
            return
        assert served
        self.requests.append((seq, prompt))

    def _step(self) -> None:
        engine, config = self.engine, self.config
        before = {seq.seq_id: len(seq.token_ids) for seq in engine.sequences.values()}
        try:
            output = engine.step()
        except (Broken, KeyboardInterrupt):
            self.count["failures"] += 1
            assert not engine.in_flight and engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
        else:
            for seq, new in zip(output.seqs, output.new_tokens, strict=True):
                if seq.seq_id in before:
                    assert seq.token_ids[before[seq.seq_id] :] == new, "each new token is reported once"
        engine.block_manager.check_invariants(holders(engine))
        check_salts(engine.block_manager, holders(engine))
        queues = [*engine.scheduler.waiting, *engine.scheduler.running]
        assert len(queues) == len(set(queues)) and set(queues) == set(engine.sequences.values())
        assert len(engine.scheduler.running) <= config.max_num_seqs
        for rows, tokens, mixed in self.runner.batches:
            assert rows <= config.max_num_seqs and tokens <= config.max_num_batched_tokens
            if config.policy == "token_budget" and not isinstance(engine.scheduler, SmallChunks):
                assert mixed <= (config.max_mixed_prefill_tokens or tokens), "too much prefill"
        self.runner.batches.clear()
        self._check_in_flight()
        self._poison()

    def _check_in_flight(self) -> None:
        """What a step in flight will write is not free; what is findable is written, or will be by such a step.

        And the rows of a step in flight are its own.
        """
        manager, held, written = self.engine.block_manager, self.engine.rows.held_by, set()
        for step in self.engine.in_flight:
            for seq, row in zip(step.batch.seqs, step.batch.rows.tolist(), strict=True):
                assert seq.row == row and held(row) is seq, "a row changed hands before its step has landed"
        running = [seq.row for seq in self.engine.scheduler.running if seq.row >= 0]
        assert len(set(running)) == len(running), "two running sequences share a row"
        for step in self.engine.in_flight:
            written |= set((step.batch.slot_mapping // manager.block_size).tolist())
        if not isinstance(self.engine.observer, MoodyObserver):  # may abort between schedule and launch
            assert not written & set(manager.free_blocks), "freed before the step in flight has landed"
        if self.rng.random() < 0.1:
            check_cached_kv(manager, self.runner, written)

    def _poison(self) -> None:
        """Garbage into every slot that nobody may read any more."""
        manager = self.engine.block_manager
        if not self.engine.in_flight:
            slots = self.runner.slots.reshape(manager.num_blocks, manager.block_size)
            slots[[b for b in manager.free_blocks if not manager.is_cached(b)]] = np.uint64(self.rng.getrandbits(64))

    def _check_end(self) -> None:
        assert_empty(self.engine)
        self.count["requests"] += len(self.requests)
        self.count["tokens beyond the first"] += self.runner.num_extra
        self.count["preemptions"] += self.engine.scheduler.num_preemptions
        self.count["hit tokens"] += self.engine.block_manager.num_hit_tokens
        for seq, prompt in self.requests:
            want, reason = oracle(self.engine, prompt, seq.params)
            assert seq.token_ids[: len(prompt)] == prompt
            assert seq.is_finished, seq
            assert not seq.block_table or self.count["failures"]
            self.count[seq.finish_reason] += 1
            if seq.finish_reason == "abort":
                assert seq.output_ids == want[: seq.num_output_tokens], seq
            else:
                assert (seq.output_ids, seq.finish_reason) == (want, reason), seq
                assert seq.stop_reason == (want[-1] if reason == "stop" else None)


def campaign(first_seed: int, steps: int) -> Counter:
    """Scenarios one after another until ``steps`` steps are done."""
    total: Counter = Counter()
    seed = first_seed
    while total["steps"] < steps:
        try:
            total += Scenario(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}: Scenario({seed}).run()")
            raise
        total["scenarios"] += 1
        seed += 1
    return total
