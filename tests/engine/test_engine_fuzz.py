"""The whole engine on SlotRunner: 100,000 random steps, and a state machine that shrinks what it finds."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from nanoengine.sampling_params import SamplingParams

from .fuzz import campaign
from .helpers import Drafting, assert_empty, assert_right, check_cached_kv, engine, finish, holders

EVENTS = ("abort", "failures", "hit tokens", "length", "stop", "preemptions", "refused")
EVENTS += ("tokens beyond the first",)


@pytest.mark.parametrize("part", range(4))
def test_random_lives(part):
    """A quarter of 100,000 steps; the exact counts prove that the events did occur."""
    counts = campaign(1000 * part, 25_000)
    assert counts["steps"] >= 25_000
    for event in EVENTS:
        assert counts[event] > 100, counts


class Life(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(1, 12), size=st.sampled_from([1, 2, 3, 4, 16, 256]), seqs=st.integers(1, 4),
        budget=st.integers(1, 30), policy=st.sampled_from(["token_budget", "prefill_first"]),
        overlap=st.integers(0, 1), hold_back=st.booleans(), caching=st.booleans(),
        most=st.integers(1, 4), cap=st.sampled_from([None, 1, 5]),
    )  # fmt: skip
    def start(self, blocks, size, seqs, budget, policy, overlap, hold_back, caching, most, cap):
        runner = Drafting(blocks, size, 5, hold_back=hold_back, rng=random.Random(most), most=most)
        self.engine = engine(
            runner=runner, max_num_seqs=seqs, max_num_batched_tokens=budget, policy=policy,
            max_mixed_prefill_tokens=cap, overlap=overlap, enable_prefix_caching=caching,
            max_model_len=40, vocab_size=5, eos_token_ids=(4,),
        )  # fmt: skip
        self.pool = blocks * size
        self.seqs: list = []

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12), max_tokens=st.integers(1, 12), eos=st.booleans(),
        copies=st.integers(1, 4),
    )  # fmt: skip
    def arrive(self, prompt, max_tokens, eos, copies):
        """Equal prompts arrive together: they start in one step, if they can."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=not eos)
        if len(prompt) <= self.pool:
            self.seqs += [self.engine.add_request(prompt, params) for _ in range(copies)]
        else:
            with pytest.raises(ValueError, match=f"the whole KV pool holds {self.pool}"):
                self.engine.add_request(prompt, params)

    @rule(n=st.integers(1, 4))
    def step(self, n):
        for _ in range(n):
            self.engine.step()

    @rule(which=st.integers(0, 100))
    def abort(self, which):
        if self.seqs:
            self.engine.abort(self.seqs[which % len(self.seqs)])

    @invariant()
    def laws(self):
        if hasattr(self, "engine"):
            manager, written = self.engine.block_manager, set()
            manager.check_invariants(holders(self.engine))
            for step in self.engine.in_flight:
                written |= set((step.batch.slot_mapping // manager.block_size).tolist())
            check_cached_kv(manager, self.engine.runner, written)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        finish(self.engine)
        assert_empty(self.engine)
        for seq in self.seqs:
            assert seq.is_finished
            if seq.finish_reason != "abort":
                assert_right(self.engine, seq)


def test_any_order_of_arrivals_steps_and_aborts():
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
