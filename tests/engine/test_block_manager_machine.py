"""Random walks through the block manager, against a model that knows the true prefix in each block."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanoengine.engine.block_manager import BlockManager, chain_hash

from .helpers import constant_hash, sequence, two_bit_hash


class Pool(RuleBasedStateMachine):
    """Model: ``truth[block]`` is the whole prefix whose KV the block holds, ``free`` the order of eviction."""

    hash_function = staticmethod(chain_hash)
    waiting = Bundle("waiting")
    live = Bundle("live")

    @initialize(size=st.sampled_from([1, 2, 3, 4, 5, 16, 255, 256]), blocks=st.integers(1, 40))
    def start(self, size, blocks):
        self.size = size
        self.manager = BlockManager(blocks, size, hash_function=self.hash_function)
        self.truth: dict[int, tuple[int, ...]] = {}
        self.free = list(range(blocks))
        self.refs = [0] * blocks
        self.holding: list = []
        self.ids = 0

    # what the model does

    def take(self, block):
        assert block == self.free.pop(0), "the oldest free block goes first"
        self.truth.pop(block, None)
        self.refs[block] = 1

    def drop(self, seq, table):
        for block in reversed(table):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.insert(len(self.free) if block in self.truth else 0, block)
        self.holding.remove(seq)

    def longest(self, tokens) -> int:
        prefixes, n = set(self.truth.values()), 0
        while n < (len(tokens) - 1) // self.size and tuple(tokens[: (n + 1) * self.size]) in prefixes:
            n += 1
        return n

    def sync_after_collisions(self):
        """With a weak hash a commit may push out another content; with the real one it never does."""
        gone = [block for block in self.truth if not self.manager.is_cached(block)]
        assert not gone or self.hash_function is not chain_hash
        for block in gone:
            del self.truth[block]

    # rules

    @rule(target=waiting, runs=st.lists(st.integers(0, 2), max_size=5), tail=st.integers(0, 300), t=st.integers(0, 1))
    def arrive(self, runs, tail, t):
        """Prompts made of few different blocks, so that prefixes are shared."""
        tokens = [token for k in runs for token in [k] * (self.size - 1) + [k % 2]]
        tokens += [t] * (tail % (self.size + 1))
        self.ids += 1
        return sequence(tokens or [t], self.ids)

    @rule(target=live, seq=consumes(waiting), reserve=st.integers(0, 3))
    def allocate(self, seq, reserve):
        manager = self.manager
        found = manager.lookup(seq)
        for i, block in enumerate(found):
            assert self.truth.get(block) == tuple(seq.token_ids[: (i + 1) * self.size]), "another prompt's KV"
        assert len(found) * self.size < len(seq.token_ids), "at least one token is computed"
        if self.hash_function is chain_hash:
            assert len(found) == self.longest(seq.token_ids)
        total = -(-len(seq.token_ids) // self.size)
        needed = total - sum(self.refs[block] > 0 for block in found)
        fits = needed + reserve <= len(self.free)
        assert manager.can_allocate(seq, found, reserve) == fits
        assert list(manager.free_blocks) == self.free, "asking changes nothing"
        if not fits:
            return multiple()
        queried, hit = manager.num_queried_tokens, manager.num_hit_tokens
        first_time = seq.num_preemptions == 0
        manager.allocate(seq, found)
        assert manager.num_queried_tokens - queried == (seq.num_prompt_tokens if first_time else 0)
        assert manager.num_hit_tokens - hit == (len(found) * self.size if first_time else 0)
        for block in found:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1
        for block in seq.block_table[len(found) :]:
            self.take(block)
        assert seq.block_table[: len(found)] == found and len(seq.block_table) == total
        assert seq.num_computed_tokens == len(found) * self.size
        self.holding.append(seq)
        return seq

    @rule(seq=live, n=st.integers(1, 600), late=st.integers(0, 300))
    def compute(self, seq, n, late):
        """A chunk or a decode: some of it has landed, the last ``late`` tokens are in flight."""
        if seq not in self.holding:
            return
        seq.num_computed_tokens = min(len(seq.token_ids), seq.capacity, seq.num_computed_tokens + n)
        written = max(0, seq.num_computed_tokens - late)
        before = seq.num_committed_blocks
        self.manager.commit(seq, written)
        assert seq.num_committed_blocks == max(before, written // self.size)
        for i in range(before, seq.num_committed_blocks):
            if i and seq.block_table[i - 1] not in self.truth:
                break  # taken out of the cache, or pushed out: what follows cannot be found
            self.truth[seq.block_table[i]] = tuple(seq.token_ids[: (i + 1) * self.size])
        self.sync_after_collisions()

    @rule(seq=live, token=st.integers(0, 1), more=st.integers(1, 3))
    def decode(self, seq, token, more):
        if seq not in self.holding or seq.num_computed_tokens < len(seq.token_ids):
            return
        missing = max(0, -(-(seq.num_computed_tokens + more) // self.size) - len(seq.block_table))
        table = list(seq.block_table)
        assert self.manager.grow(seq, more) == (missing <= len(self.free))
        if missing > len(self.free):
            assert seq.block_table == table
            return
        assert len(seq.block_table) == len(table) + missing and seq.block_table[: len(table)] == table
        for block in seq.block_table[len(table) :]:
            self.take(block)
        seq.token_ids += [token] * more
        seq.num_tokens += more

    @rule(target=waiting, seq=consumes(live), preempted=st.booleans())
    def preempt(self, seq, preempted):
        if seq not in self.holding:
            return multiple()
        table = seq.block_table
        self.manager.free(seq)
        self.drop(seq, table)
        if not preempted:
            return multiple()  # finished, or aborted
        assert table, "the old table is replaced, not emptied: a batch in flight reads it"
        seq.restart()
        seq.num_preemptions += 1
        return seq

    @rule(seq=live, ends=st.booleans())
    def uncache(self, seq, ends):
        """A step has failed: what it was computed from is found no longer, by nobody."""
        if seq not in self.holding:
            return
        prefixes = [self.truth[block] for block in seq.block_table if block in self.truth]
        table = list(seq.block_table)
        self.manager.uncache(seq)
        assert seq.block_table == table
        for block, prefix in list(self.truth.items()):
            if any(prefix[: len(known)] == known for known in prefixes):
                assert not self.manager.is_cached(block)
                del self.truth[block]
        self.sync_after_collisions()
        if ends:
            self.manager.free(seq)
            self.drop(seq, table)

    @precondition(lambda self: len(self.holding) > 1)
    @rule()
    def reset(self):
        self.manager.reset()
        for seq in self.holding:
            seq.restart()
        self.holding = []
        self.truth, self.free = {}, list(range(self.manager.num_blocks))
        self.refs = [0] * self.manager.num_blocks

    @invariant()
    def laws(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants(self.holding)
        assert list(self.manager.free_blocks) == self.free
        assert self.manager.ref_counts == self.refs
        assert {b for b in range(len(self.refs)) if self.manager.is_cached(b)} == set(self.truth)


class ConstantHashPool(Pool):
    hash_function = staticmethod(constant_hash)


class TwoBitHashPool(Pool):
    hash_function = staticmethod(two_bit_hash)


@pytest.mark.parametrize("machine", [Pool, ConstantHashPool, TwoBitHashPool])
def test_random_walks_keep_every_law(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
