"""A block manager without a prefix cache, short enough to read in a lesson.

What lesson 05 builds: block tables, reference counts, a free list. Lesson 06 puts a cache on top of it.
"""

from __future__ import annotations

from collections import OrderedDict

from nanoengine.engine.sequence import Sequence


class PlainPool:
    """Blocks of ``block_size`` tokens. A subclass that caches overrides lookup, commit and take."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.reset()

    def reset(self) -> None:
        self.refs = [0] * self.num_blocks
        self.free_blocks = OrderedDict.fromkeys(range(self.num_blocks))  # oldest first

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def take(self) -> int:
        """The oldest free block."""
        block, _ = self.free_blocks.popitem(last=False)
        self.refs[block] = 1
        return block

    def lookup(self, seq: Sequence) -> list[int]:
        return []  # nothing is ever remembered

    def commit(self, seq: Sequence, num_written: int) -> None:
        pass

    def can_allocate(self, seq: Sequence, cached: list[int], reserve: int = 0) -> bool:
        revived = sum(not self.refs[block] for block in cached)
        fresh = -(-len(seq.token_ids) // self.block_size) - len(cached)
        return fresh + revived + reserve <= self.num_free_blocks

    def allocate(self, seq: Sequence, cached: list[int]) -> None:
        for block in cached:
            self.free_blocks.pop(block, None)  # revived, if nobody held it
            self.refs[block] += 1
        seq.block_table = list(cached)
        seq.num_computed_tokens = len(cached) * self.block_size
        seq.num_committed_blocks = len(cached)
        if not seq.num_preemptions:
            seq.num_cached_tokens = seq.num_computed_tokens
        self.grow(seq, len(seq.token_ids) - seq.num_computed_tokens)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        missing = -(-(seq.num_computed_tokens + num_tokens) // self.block_size) - len(seq.block_table)
        if missing > self.num_free_blocks:
            return False
        seq.block_table += [self.take() for _ in range(missing)]
        seq.capacity = len(seq.block_table) * self.block_size
        return True

    def free(self, seq: Sequence) -> None:
        """The tail goes into the free list first, so that it is taken before the head."""
        for block in reversed(seq.block_table):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free_blocks[block] = None
        seq.block_table, seq.capacity, seq.num_committed_blocks = [], 0, 0
