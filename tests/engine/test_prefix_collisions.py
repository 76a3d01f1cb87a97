"""Hash collisions, and equal tokens under different parents: never another prompt's KV (engine_cases 12)."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine.engine.block_manager import BlockManager, chain_hash

from .helpers import assert_right, cached, constant_hash, engine, finish, sequence

A, B, C, D = [1, 1], [2, 2], [3, 3], [4, 4]  # blocks of two tokens


def manager(num_blocks=8, **kwargs) -> BlockManager:
    return BlockManager(num_blocks, 2, **kwargs)


def hits(m: BlockManager, tokens) -> int:
    return len(m.lookup(sequence(tokens)))


def colliding(*pairs):
    """A hash under which just the two blocks of each pair collide, whatever came before them."""
    same = {np.array(b, np.int64).tobytes(): np.array(a, np.int64).tobytes() for a, b in pairs}

    def function(parent_key: int, tokens: bytes) -> int:
        return hash((parent_key, same.get(tokens, tokens))) & (2**64 - 1)

    return function


def test_collision_in_a_block_is_a_miss():
    m = manager(hash_function=colliding((A, C)))
    m.free(cached(m, A + [0]))
    assert hits(m, A + [0]) == 1
    assert hits(m, C + [0]) == 0


def test_collision_in_the_parent_is_a_miss():
    m = manager(hash_function=colliding((A, C)))
    m.free(cached(m, A + B + [0]))
    m.free(cached(m, C + [0]))  # overwrites A's entry; [A][B] is still in the map, under the key of [C][B]
    assert hits(m, C + B + [0]) == 1
    assert hits(m, A + B + [0]) == 0
    m.check_invariants([])


def test_collision_then_the_true_child_is_cached():
    m = manager(hash_function=colliding((A, C)))
    m.free(cached(m, A + B + [0]))
    m.free(cached(m, C + B + [0]))
    assert hits(m, C + B + [0]) == 2
    assert hits(m, A + B + [0]) == 0
    m.free(cached(m, A + B + [0]))
    assert hits(m, A + B + [0]) == 2
    assert hits(m, C + B + [0]) == 0
    m.check_invariants([])


def test_collision_while_the_loser_is_in_use_then_goes_on():
    m = manager(hash_function=colliding((A, C)))
    seq = cached(m, A + [0], num_written=2)
    other = cached(m, C + [0], seq_id=2)
    seq.token_ids[2:] = B + [0]  # commits [A][B] although the entry of A is gone
    assert m.grow(seq, 3)
    seq.num_computed_tokens = 5
    m.commit(seq, 5)
    assert hits(m, C + B + [0]) == 1
    assert hits(m, A + B + [0]) == 0
    m.check_invariants([seq, other])
    m.free(seq)
    m.free(other)
    m.check_invariants([])


def test_collision_two_levels_deep():
    m = manager(12, hash_function=colliding((A, C), (B, D)))
    m.free(cached(m, A + B + A + [0]))
    for prompt in (C + B + A, A + D + A, C + D + A, A + B + C):
        found = m.lookup(sequence(prompt + [0]))
        same = 0
        while prompt[2 * same : 2 * same + 2] == (A + B + A)[2 * same : 2 * same + 2] and same < 3:
            same += 1
        assert len(found) == same, prompt


def test_content_ids_are_not_used_again_after_reset():
    m = manager()
    seq = cached(m, A + [0])
    before = seq.content_id
    m.reset()
    seq.restart()
    assert hits(m, A + [0]) == 0
    assert cached(m, C + [0]).content_id > before


def test_outputs_are_right_when_everything_collides():
    eng = engine(12, 2, block_manager=BlockManager(12, 2, hash_function=constant_hash), max_num_seqs=3)
    prompts = [[a, a, b, b, c] for a in (1, 2) for b in (1, 2) for c in (1, 2)] * 3
    seqs = [eng.add_request(p) for p in prompts]
    finish(eng)
    for seq in seqs:
        assert_right(eng, seq)


# same tokens under different parents


def test_same_tokens_under_another_parent_are_another_content():
    m = manager()
    m.free(cached(m, A + B + [0]))
    assert hits(m, B + [0]) == 0
    assert hits(m, B + B + [0]) == 0
    m.free(cached(m, C + B + [0]))
    assert hits(m, C + B + [0]) == 2


def test_token_order_and_wide_ids_matter():
    m = manager()
    m.free(cached(m, [1, 2**31 - 1, 0]))
    assert hits(m, [2**31 - 1, 1, 0]) == 0
    assert hits(m, [1, 2**31 - 1, 0]) == 1


# salts


@pytest.mark.parametrize("hash_function", [chain_hash, constant_hash, colliding((A, C))])
def test_salts_never_share_whatever_the_hash(hash_function):
    """Also salts that look like tokens, or like another salt with tokens behind it."""
    m = manager(40, hash_function=hash_function)
    like_tokens = (b"\x01" + b"\x00" * 7).decode()
    salts = [None, "a", "aa", like_tokens, like_tokens * 2, "\ud83d\ude00", "\U0001f600"]
    for i, salt in enumerate(salts):
        m.free(cached(m, A + B + [0], seq_id=i, cache_salt=salt))
        if hash_function is not constant_hash:  # there B pushes out A
            assert len(m.lookup(sequence(A + B + [1], cache_salt=salt))) == 2, "its own is found"
        for other in salts[i + 1 :]:
            assert not m.lookup(sequence(A + B + [0], cache_salt=other)), (salt, other)
            assert not m.lookup(sequence(A + A + B + [0], cache_salt=other)), (salt, other)
    m.check_invariants([])
