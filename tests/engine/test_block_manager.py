"""Named cases of block tables and prefix cache (engine_cases 9 to 11, and more of each kind)."""

from __future__ import annotations

import pytest

from nanoengine.engine.block_manager import BlockManager

from .helpers import Counting, assert_right, cached, engine, finish, sequence

A, B, C, D = [1, 1], [2, 2], [3, 3], [4, 4]  # blocks of two tokens


def manager(num_blocks=8, block_size=2, **kwargs) -> BlockManager:
    return BlockManager(num_blocks, block_size, **kwargs)


def hits(m: BlockManager, tokens) -> int:
    return len(m.lookup(sequence(tokens)))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 256])
def test_at_least_one_token_is_always_computed(size):
    for length in (max(1, size - 1), size, size + 1, 2 * size, 2 * size + 1):
        m = manager(8, size)
        m.free(cached(m, range(length)))
        again = cached(m, range(length))
        assert again.num_cached_tokens == (length - 1) // size * size < length


@pytest.mark.parametrize(("length", "hit"), [(512, 256), (256, 0), (513, 512), (257, 256), (255, 0)])
def test_block_256_hits_as_nano_vllm_users_expect(length, hit):
    eng = engine(8, 256, max_model_len=1000)
    for expected in (0, hit):
        seq = eng.add_request([1] * length)
        finish(eng)
        assert seq.num_cached_tokens == expected
        assert_right(eng, seq)


def test_block_of_one_token():
    m = manager(6, 1)
    m.free(cached(m, [7, 8, 9]))
    assert hits(m, [7, 8, 9]) == 2
    assert hits(m, [7, 8, 9, 9]) == 3
    assert hits(m, [8, 9]) == 0


# case 10: two identical prompts in one step (that they share is the scheduler's doing: test_sharing.py)


def test_identical_prompts_looked_up_before_either_is_registered_end_as_one_content():
    m = manager()
    first, second = sequence(A + B + [5], 1), sequence(A + B + [5], 2)
    for seq in (first, second):
        m.allocate(seq, m.lookup(seq))
        assert seq.num_cached_tokens == 0
    assert not set(first.block_table) & set(second.block_table)
    for seq in (first, second):
        seq.num_computed_tokens = 5
        m.commit(seq, 5)
    assert first.content_id == second.content_id
    m.check_invariants([first, second])
    assert hits(m, A + B + [5]) == 2


def test_evicting_one_of_two_duplicates_leaves_the_other_findable():
    m = manager(7)
    first, second = sequence(A + B + [5], 1), sequence(A + B + [5], 2)
    for seq in (first, second):
        m.allocate(seq, [])
    for seq in (first, second):
        seq.num_computed_tokens = 5
        m.commit(seq, 5)
    first_table = first.block_table
    m.free(first)
    other = cached(m, [9] * 7)  # takes the four free blocks: both of first's cached ones among them
    assert set(first_table) < set(other.block_table)
    assert m.lookup(sequence(A + B + [5])) == second.block_table[:2]
    m.free(second)
    assert m.lookup(sequence(A + B + [5])) != []
    m.check_invariants([other])


def test_of_duplicates_the_one_in_use_is_shared_so_that_no_free_block_is_spent():
    m = manager(5)
    first, second = sequence(A + [5], 1), sequence(A + [5], 2)
    for seq in (first, second):
        m.allocate(seq, [])
    for seq in (first, second):
        seq.num_computed_tokens = 3
        m.commit(seq, 3)
    kept = second.block_table[0]
    m.free(first)
    free = m.num_free_blocks
    third = cached(m, A + [6], seq_id=3)
    assert third.block_table[0] == kept
    assert m.num_free_blocks == free - 1


# case 11: evict, then ask again; preempt, then hit one's own prefix


def test_evicted_prefix_is_a_miss():
    m = manager(3)
    m.free(cached(m, A + B + [5]))
    m.free(cached(m, C + D + [5]))
    assert hits(m, A + B + [5]) == 0
    assert hits(m, C + D + [5]) == 2


def test_tail_is_evicted_before_head():
    m = manager(4)
    m.free(cached(m, A + B + C + [5]))
    m.free(cached(m, [9] * 3))  # needs two blocks: the one that held no content, then the tail C
    assert hits(m, A + B + C + [5]) == 2
    assert hits(m, A + B + [5]) == 2


def test_oldest_is_evicted_first_and_a_hit_makes_young_again():
    m = manager(4)
    m.free(cached(m, A + [0]))
    m.free(cached(m, B + [0]))
    m.free(cached(m, A + [1]))  # revives A, which is now younger than B
    m.free(cached(m, C + [0] + C))  # three blocks: two that hold nothing, and the oldest content
    assert hits(m, A + [0]) == 1
    assert hits(m, B + [0]) == 0


def test_revived_block_is_not_free_any_more():
    m = manager(3)
    m.free(cached(m, A + B + [0]))
    seq = sequence(A + B + [1])
    found = m.lookup(seq)
    assert m.can_allocate(seq, found)
    assert not m.can_allocate(seq, found, reserve=1)
    m.allocate(seq, found)
    assert m.num_free_blocks == 0
    m.check_invariants([seq])


def test_preempted_sequence_hits_its_own_prefix_and_does_not_count_it_as_a_hit():
    m = manager(4)
    seq = cached(m, A + B + [5])
    assert (m.num_queried_tokens, m.num_hit_tokens) == (5, 0)
    m.free(seq)
    seq.restart()
    seq.num_preemptions += 1
    found = m.lookup(seq)
    m.allocate(seq, found)
    assert seq.num_computed_tokens == 4
    assert (m.num_queried_tokens, m.num_hit_tokens, seq.num_cached_tokens) == (5, 0, 0)


def test_hit_rate_counts_each_prompt_once():
    m = manager(8)
    m.free(cached(m, A + B + [5]))
    m.free(cached(m, A + B + [6]))
    m.free(cached(m, A + C + [6]))
    assert (m.num_queried_tokens, m.num_hit_tokens) == (15, 4 + 2)


# what is cached, and when


def test_only_written_full_blocks_are_findable():
    m = manager()
    seq = sequence(A + B + [5])
    m.allocate(seq, [])
    seq.num_computed_tokens = 5  # launched; not landed
    assert hits(m, A + B + [5]) == 0
    m.commit(seq, 3)
    assert hits(m, A + B + [5]) == 1
    m.commit(seq, 5)
    assert hits(m, A + B + [5]) == 2
    m.commit(seq, 5)
    assert hits(m, A + B + [5]) == 2
    m.check_invariants([seq])


def test_a_block_without_content_is_taken_before_any_cached_one():
    m = manager(4)
    m.free(cached(m, A + B + [5]))
    seq = cached(m, [9])
    m.free(seq)
    m.free(cached(m, [8, 8, 8]))
    assert hits(m, A + B + [5]) == 2


def test_generated_tokens_are_cached_too():
    eng = engine(16, 2)
    first = eng.add_request([1, 2, 3])
    finish(eng)
    second = eng.add_request(first.token_ids[:12])
    finish(eng)
    assert second.num_cached_tokens == 10
    assert_right(eng, second)


def test_caching_off_finds_nothing_hashes_nothing():
    count = Counting()
    m = manager(enable_prefix_caching=False, hash_function=count)
    m.free(cached(m, A + B + [5]))
    assert hits(m, A + B + [5]) == 0
    assert count.calls == 0 and not any(m.is_cached(b) for b in range(8))


def test_lookup_hashes_a_prompt_once_and_stops_at_the_first_miss():
    count = Counting()
    m = manager(hash_function=count)
    m.free(cached(m, A + B + [5]))
    count.calls = 0
    seq = sequence(A + C + D + D + [0])
    for _ in range(5):
        m.lookup(seq)
    assert count.calls == 2


# misuse and laws


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 4), (4, -1)])
def test_sizes_below_one_are_refused(blocks, size):
    with pytest.raises(ValueError, match=f"num_blocks and block_size must be at least 1, got {blocks} and {size}"):
        BlockManager(blocks, size)


def test_allocate_twice_is_refused():
    m = manager()
    seq = cached(m, A)
    with pytest.raises(ValueError, match="already has blocks"):
        m.allocate(seq, [])


def test_free_twice_changes_nothing():
    m = manager()
    seq = cached(m, A + [1])
    m.free(seq)
    m.free(seq)
    m.check_invariants([])


def test_free_leaves_the_old_table_to_a_batch_in_flight():
    m = manager()
    seq = cached(m, A + [1])
    table = seq.block_table
    m.free(seq)
    assert table and seq.block_table == []


def test_grow_takes_all_or_nothing():
    m = manager(3)
    seq = cached(m, A)
    assert not m.grow(seq, 5)
    assert m.num_free_blocks == 2 and len(seq.block_table) == 1
    assert m.grow(seq, 4)
    assert m.num_free_blocks == 0 and seq.capacity == 6
    assert m.grow(seq, 4), "what it has room for already needs no block"
