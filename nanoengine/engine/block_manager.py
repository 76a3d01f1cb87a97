"""Who owns which KV block: block tables, reference counts, and the prefix cache.

    a block is   in use        ref_count > 0, not in the free list
                 cached, free  ref_count = 0, in the free list, still holds a known content
                 free          ref_count = 0, in the free list, holds nothing of use

The free list is an ordered dict: taking the oldest, adding at either end and removing one from
the middle (a cached block that is asked for again) are all O(1).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import xxhash

from nanoengine.engine.sequence import Sequence

ROOT = 0  # content id of the empty prefix: the parent of every first block

HashFunction = Callable[[int, bytes], int]


def chain_hash(parent_key: int, tokens: bytes) -> int:
    """64-bit xxHash of a block's tokens, chained to the hash of all blocks before it."""
    return xxhash.xxh64_intdigest(parent_key.to_bytes(8, "little") + tokens)


@dataclass(slots=True, eq=False)
class Content:
    """One cached content: these tokens after that parent. Blocks that hold the same share it.

    A hash only finds an entry. That it is the right one is known by comparing the tokens and the
    parent's content id, which is unique and never used again: by induction the whole prefix is equal.
    """

    content_id: int
    key: int
    parent_id: int
    tokens: bytes  # 8 each; of a first block the sequence's cache_salt before them
    blocks: list[int]


class BlockManager:
    """Gives blocks of ``block_size`` tokens to sequences and takes them back.

    num_blocks, block_size: >= 1. hash_function: (hash of the prefix, token bytes) -> hash; only
    tests and lessons pass another one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = chain_hash,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._hash = hash_function
        self._next_content_id = ROOT + 1  # not part of reset(): ids are never used again
        self.num_queried_tokens = self.num_hit_tokens = 0
        self.reset()

    def reset(self) -> None:
        """All blocks free, nothing cached. Sequences must forget their tables (Sequence.restart)."""
        self.ref_counts = [0] * self.num_blocks
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self._contents: dict[int, Content] = {}
        self._content_of: list[Content | None] = [None] * self.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """ceil(num_tokens / block_size)"""
        return -(-num_tokens // self.block_size)

    # admission: look up the prefix, see whether the rest fits, take it

    def lookup(self, seq: Sequence) -> list[int]:
        """Blocks that hold the longest cached prefix of ``seq``; changes nothing.

        At least one token is left to compute: logits come from computing a token, not from KV.
        For the same reason a sequence that reports prompt_logprobs computes its whole prompt.
        So does one that has found KV of others and got no token from it.
        """
        asks_for_all = seq.params.prompt_logprobs is not None or not seq.shares_prefix
        if not self.enable_prefix_caching or asks_for_all:
            return []
        found, parent = [], ROOT
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            key, tokens = self._key(seq, i)
            content = self._contents.get(key)
            if content is None or content.parent_id != parent or content.tokens != tokens:
                break
            # of several blocks with this content rather one that is in use: it costs no free block
            found.append(max(content.blocks, key=self.ref_counts.__getitem__))
            parent = content.content_id
        return found

    def can_allocate(self, seq: Sequence, cached: list[int], reserve: int = 0) -> bool:
        """True if all blocks of ``seq`` fit and ``reserve`` more stay free."""
        revived = sum(not self.ref_counts[block] for block in cached)
        fresh = self.blocks_for(len(seq.token_ids)) - len(cached)
        return fresh + revived + reserve <= len(self.free_blocks)

    def allocate(self, seq: Sequence, cached: list[int]) -> None:
        """Give ``seq`` the ``cached`` blocks of lookup() and fresh ones for the rest of its tokens.

        The whole prompt is taken at once: what a chunked prefill still needs is promised to it
        and cannot be eaten by others.
        """
        if seq.block_table:
            raise ValueError(f"sequence {seq.seq_id} already has blocks")
        for block in cached:
            if not self.ref_counts[block]:
                del self.free_blocks[block]
            self.ref_counts[block] += 1
        fresh = self.blocks_for(len(seq.token_ids)) - len(cached)
        seq.block_table = cached + [self._take() for _ in range(fresh)]
        seq.capacity = len(seq.block_table) * self.block_size
        seq.num_computed_tokens = len(cached) * self.block_size
        seq.num_committed_blocks = len(cached)
        seq.content_id = self._content_of[cached[-1]].content_id if cached else ROOT
        if not seq.num_preemptions:  # a preempted sequence finds its own KV again: that is no hit
            seq.num_cached_tokens = seq.num_computed_tokens
            self.num_queried_tokens += seq.num_prompt_tokens
            self.num_hit_tokens += seq.num_computed_tokens

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` beyond the computed ones; False, and no change, if it cannot."""
        missing = self.blocks_for(seq.num_computed_tokens + num_tokens) - len(seq.block_table)
        if missing > len(self.free_blocks):
            return False
        for _ in range(missing):
            seq.block_table.append(self._take())
        seq.capacity = len(seq.block_table) * self.block_size
        return True

    def free(self, seq: Sequence) -> None:
        """Drop the references of ``seq``. Cached blocks keep their content until they are taken.

        The tail goes first, so that it is evicted before the head, which more prompts share.
        The table is replaced, not emptied: a batch in flight may still read the old one.
        """
        for block in reversed(seq.block_table):
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self.free_blocks[block] = None
                if self._content_of[block] is None:  # nothing to lose: take this one first
                    self.free_blocks.move_to_end(block, last=False)
        seq.block_table, seq.capacity = [], 0
        seq.num_committed_blocks, seq.content_id = 0, ROOT

    # the prefix cache

    def commit(self, seq: Sequence, num_written: int) -> None:
        """Register the full blocks among the first ``num_written`` tokens: later lookups find them.

        Their KV is written, or will be by the step that is being scheduled. A row of that same step
        may share them already, as a runner stores all KV of a step before any row attends.
        """
        if not self.enable_prefix_caching:
            return
        for i in range(seq.num_committed_blocks, min(num_written, len(seq.token_ids)) // self.block_size):
            seq.num_committed_blocks += 1
            if i and self._content_of[seq.block_table[i - 1]] is None:
                continue  # the block before it was taken out of the cache: nobody could find it
            key, tokens = self._key(seq, i)
            content = self._contents.get(key)
            if content is None or content.parent_id != seq.content_id or content.tokens != tokens:
                if content is not None:  # a collision, or the child of an evicted parent
                    self._forget(content)
                content = Content(self._next_content_id, key, seq.content_id, tokens, [])
                self._next_content_id += 1
                self._contents[key] = content
            content.blocks.append(seq.block_table[i])
            self._content_of[seq.block_table[i]] = content
            seq.content_id = content.content_id

    def uncache(self, seq: Sequence) -> None:
        """Make findable no longer what the blocks of ``seq`` hold, nor anything chained to it.

        For KV that may be wrong. All blocks of its table count, also those that it found in the cache
        (they may be where the fault came from) and blocks of others with the same content. Who holds
        them keeps them: tables and ref counts stay. What ``seq``, or another sequence on the same
        prefix, commits after this is not made findable either. O(pool), if anything was cached.
        """
        contents = [self._content_of[block] for block in seq.block_table]
        gone = {content.content_id for content in contents if content is not None}
        if gone:
            for content in list(self._contents.values()):  # by their ids: parents before children
                if content.content_id in gone or content.parent_id in gone:
                    gone.add(content.content_id)
                    self._forget(content)

    def is_cached(self, block: int) -> bool:
        """True if the block holds a content that a later prompt can find."""
        return self._content_of[block] is not None

    def _key(self, seq: Sequence, index: int) -> tuple[int, bytes]:
        """(chained hash, token bytes) of block ``index`` of the sequence's known tokens.

        The salt of the cache is part of what the first block is known by: hashed, and compared. A
        later block is found only after its parent, so two salts never share, whatever the hash.
        """
        keys, size = seq.block_keys, self.block_size
        while len(keys) <= index:
            start = len(keys) * size
            tokens = array("q", seq.token_ids[start : start + size]).tobytes()
            if not keys and seq.cache_salt is not None:  # all bytes before the last 8 a token are the salt: no two
                tokens = seq.cache_salt.encode("utf-8", "surrogatepass") + tokens  # salts can mean the same
            keys.append((self._hash(keys[-1][0] if keys else ROOT, tokens), tokens))
        return keys[index]

    def _take(self) -> int:
        """The oldest free block, its content evicted."""
        block, _ = self.free_blocks.popitem(last=False)
        content = self._content_of[block]
        if content is not None:
            self._content_of[block] = None
            content.blocks.remove(block)
            if not content.blocks:
                del self._contents[content.key]
        self.ref_counts[block] = 1
        return block

    def _forget(self, content: Content) -> None:
        for block in content.blocks:
            self._content_of[block] = None
        del self._contents[content.key]

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError, with the block named, if any law of the pool is broken. O(pool)."""
        counts = [0] * self.num_blocks
        for seq in sequences:
            if seq.capacity != len(seq.block_table) * self.block_size:
                raise AssertionError(f"sequence {seq.seq_id}: capacity {seq.capacity} does not fit its table")
            if len(set(seq.block_table)) != len(seq.block_table):
                raise AssertionError(f"sequence {seq.seq_id} holds a block twice: {seq.block_table}")
            first_writable = seq.num_computed_tokens // self.block_size
            for i, block in enumerate(seq.block_table):
                counts[block] += 1
                if i >= first_writable and (self.ref_counts[block] > 1 or i < seq.num_committed_blocks):
                    raise AssertionError(f"block {block} is shared or cached, and sequence {seq.seq_id} will write it")
        for block, (held, count) in enumerate(zip(counts, self.ref_counts, strict=True)):
            if held != count:
                raise AssertionError(f"block {block}: ref_count {count}, but {held} sequences hold it")
            if (count == 0) != (block in self.free_blocks):
                raise AssertionError(f"block {block}: ref_count {count}, in free list: {block in self.free_blocks}")
        used = sum(count > 0 for count in counts)
        if len(self.free_blocks) + used != self.num_blocks:
            raise AssertionError(f"{len(self.free_blocks)} free + {used} used != {self.num_blocks} blocks")
        for key, content in self._contents.items():
            if content.key != key or not content.blocks:
                raise AssertionError(f"content {content.content_id} is in the map under a wrong key or without a block")
            for block in content.blocks:
                if self._content_of[block] is not content:
                    raise AssertionError(f"block {block} does not hold content {content.content_id}")
        for block, content in enumerate(self._content_of):
            if content is not None and self._contents.get(content.key) is not content:
                raise AssertionError(f"block {block} holds content {content.content_id}, which is not in the map")
