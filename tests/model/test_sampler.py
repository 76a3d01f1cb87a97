"""The sampler against brute force in plain Python, and its random numbers against the distribution they claim."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine import SamplingParams
from nanoengine.engine.sequence import Sequence
from nanoengine.kernels.gumbel_noise import gumbel_noise
from nanoengine.worker.sampler import Sampler, truncate

VOCAB = 12


def sequence(prompt=(0,), output=(), *, seed=0, ends=(), **params) -> Sequence:
    seq = Sequence(0, list(prompt), SamplingParams(**params), max_total_tokens=10**9, seed=seed)
    seq.end_token_ids = frozenset(ends)
    seq.token_ids += output
    return seq


def sample(logits, seqs, sampler=None, positions=None) -> list[int]:
    logits = torch.as_tensor(logits, dtype=torch.float32).reshape(len(seqs), -1).clone()
    positions = [len(seq.token_ids) for seq in seqs] if positions is None else positions
    return (sampler or Sampler())(logits, seqs, np.array(positions, np.int64)).tolist()


# greedy


@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}, {"top_p": 0.01, "seed": 3}])
def test_temperature_0_is_greedy_whatever_else_is_asked(extra):
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    for position in range(20):
        got = sample(logits, [sequence(temperature=0, **extra)], positions=[position])
        assert got == [logits.argmax().item()]


def test_greedy_takes_the_first_of_equal_logits():
    assert sample([1.0, 5.0, 5.0, 0.0], [sequence(temperature=0)]) == [1]


def test_greedy_and_sampled_rows_in_one_batch():
    """Each row's token is what it gets alone, wherever it stands."""
    rng = random.Random(0)
    kinds = [dict(temperature=0, top_p=0.9), dict(temperature=0.7), dict(temperature=2.0, top_k=4),
             dict(temperature=1.0, top_p=0.5, min_p=0.1), dict(temperature=0), dict(temperature=1e-9),
             dict(temperature=1.0, repetition_penalty=2.0), dict(temperature=0, presence_penalty=2.0)]  # fmt: skip
    logits = torch.randn(len(kinds), 500)
    seqs = [sequence([1, 2, 3], [int(logits[i].argmax())], seed=i, **kind) for i, kind in enumerate(kinds)]
    alone = [sample(logits[i], [seq])[0] for i, seq in enumerate(seqs)]
    assert alone[0] == logits[0].argmax() and alone[5] == logits[5].argmax()
    for _ in range(10):
        order = rng.sample(range(len(kinds)), rng.randint(1, len(kinds)))
        assert sample(logits[order], [seqs[i] for i in order]) == [alone[i] for i in order]


# the random numbers


def chi_square(counts, probs) -> float:
    """Statistic over its degrees of freedom, small cells joined; about 1 if the counts follow ``probs``."""
    n, cells, rest = sum(counts), [], [0, 0.0]
    for count, p in zip(counts, probs, strict=True):
        if p * n >= 5:
            cells.append((count, p * n))
        else:
            rest = [rest[0] + count, rest[1] + p * n]
    if rest[1] >= 5:
        cells.append(tuple(rest))
    return sum((c - e) ** 2 / e for c, e in cells) / (len(cells) - 1)


def draws(logits: torch.Tensor, seqs_seeds, positions, **params) -> list[int]:
    seqs = [sequence(seed=int(s), **params) for s in seqs_seeds]
    return sample(logits.expand(len(seqs), -1), seqs, positions=list(positions))


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5, 10.0])
@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_follow_softmax(temperature, by):
    """20,000 draws that differ in the seed alone, or in the position alone. The
    bound is some 5 standard deviations; the seeds are fixed."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(5)) * 2
    n = 20_000
    seeds, positions = (range(n), [7] * n) if by == "seed" else ([11] * n, range(n))
    tokens = draws(logits, seeds, positions, temperature=temperature)
    counts = torch.bincount(torch.tensor(tokens), minlength=50).tolist()
    assert chi_square(counts, (logits / temperature).softmax(-1).tolist()) < 2.2


def test_draws_follow_the_truncated_distribution():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0])
    tokens = draws(logits, range(20_000), [3] * 20_000, top_k=3)
    counts = torch.bincount(torch.tensor(tokens), minlength=5).tolist()
    assert counts[3:] == [0, 0]
    assert chi_square(counts[:3], logits[:3].softmax(-1).tolist()) < 5


@pytest.mark.parametrize("step", ["seed", "position", "both"])
def test_neighbouring_draws_are_independent(step):
    """Pairs of draws at (seed, position) and its neighbour fill the 8 x 8 table evenly."""
    n = 20_000
    logits = torch.zeros(8)
    s, p = int(step != "position"), int(step != "seed")
    first = draws(logits, range(n), range(n, 0, -1))
    second = draws(logits, range(s, n + s), range(n + p, p, -1))
    counts = torch.bincount(torch.tensor(first) * 8 + torch.tensor(second), minlength=64).tolist()
    assert chi_square(counts, [1 / 64] * 64) < 1.75


def test_noise_is_finite_and_has_the_moments_of_gumbel():
    """Twenty million numbers: a value in 2^24 that rounds to infinity would draw a token whatever its logit."""
    total = square = 0.0
    for block in range(13):
        noise = gumbel_noise(torch.arange(32) + 32 * block, torch.arange(32) * 3, 50_000)
        assert torch.isfinite(noise).all()
        assert noise.max() < 38 and noise.min() > -5
        total, square = total + noise.double().mean().item(), square + noise.double().square().mean().item()
    assert total / 13 == pytest.approx(0.5772, abs=2e-3)
    assert square / 13 == pytest.approx(math.pi**2 / 6 + 0.5772**2, abs=5e-3)


def test_a_token_without_a_chance_is_never_drawn():
    """The logit of one token is 60 above all others (e^-60 each): 300 positions over a large vocabulary."""
    logits = torch.full((49_152,), -60.0)
    logits[77] = 0.0
    for block in range(10):
        assert set(draws(logits, range(30), range(30 * block, 30 * block + 30))) == {77}


def test_seeds_of_any_size_and_sign_differ():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**62]
    rows = gumbel_noise(torch.tensor(seeds), torch.zeros(len(seeds), dtype=torch.int64), 100)
    assert len({tuple(row.tolist()) for row in rows}) == len(seeds)
    assert len(sample(torch.zeros(7, 1000), [sequence(seed=s) for s in seeds])) == 7


def test_huge_temperature_is_uniform():
    tokens = draws(torch.tensor([9.0, 0.0, -9.0, 3.0]), range(8000), [0] * 8000, temperature=1e4)
    assert chi_square(torch.bincount(torch.tensor(tokens), minlength=4).tolist(), [0.25] * 4) < 5


# truncation


def kept(scores: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """By brute force: sort by score then id, cut, add up in exact sums."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    order = order[:top_k] if top_k else order
    weights = [math.exp(scores[i] - scores[order[0]]) for i in order]
    chosen = []
    for rank, i in enumerate(order):
        enough = top_p < 1 and math.fsum(weights[:rank]) / math.fsum(weights) >= top_p
        if rank and (enough or weights[rank] < min_p):
            break
        chosen.append(i)
    return set(chosen)


def row(scores, top_k=0, top_p=1.0, min_p=0.0) -> set[int]:
    out = truncate(torch.tensor([scores]), torch.tensor([[top_k]]), torch.tensor([[top_p]]), torch.tensor([[min_p]]))[0]
    inside = torch.isfinite(out)
    assert torch.equal(out[inside], torch.tensor(scores)[inside]), "what is kept keeps its score"
    return set(inside.nonzero().flatten().tolist())


@settings(max_examples=300)
@given(
    scores=st.lists(st.integers(-40, 40).map(lambda x: x / 8), min_size=1, max_size=20),
    top_k=st.integers(0, 25),
    top_p=st.integers(1, 40).map(lambda x: x / 40),
    min_p=st.integers(0, 20).map(lambda x: x / 20),
)
def test_kept_set_is_that_of_brute_force(scores, top_k, top_p, min_p):
    near = [(top_p + d, max(min_p + d, 0.0)) for d in (0, -1e-5, 1e-5) if top_p + d <= 1]
    found = [row(scores, top_k, *cuts) for cuts in near]  # equal but for a sum that rounds at the threshold
    assert kept(scores, top_k, top_p, min_p) in found


@pytest.mark.parametrize(
    ("scores", "cut", "want"),
    [
        ([1.0, 1.0, 1.0, 1.0], dict(top_k=2), {0, 1}),  # ties: the lower id, exactly k
        ([0.0, 1.0, 1.0, 1.0], dict(top_k=1), {1}),
        ([1.0, 1.0, 1.0, 1.0], dict(top_p=0.49), {0, 1}),
        ([1.0, 1.0, 1.0, 1.0], dict(min_p=1.0), {0, 1, 2, 3}),
        ([5.0, 0.0, 0.0], dict(top_p=1e-9), {0}),
        ([5.0, 0.0, 0.0], dict(top_k=10**6), {0, 1, 2}),
        ([5.0], dict(top_k=1, top_p=1e-9, min_p=1.0), {0}),
        ([0.0, -60.0, -61.0], dict(min_p=1e-30), {0, 1, 2}),  # top_p=1 drops nothing, however unlikely
    ],
)
def test_kept_set(scores, cut, want):
    assert row(scores, **cut) == want


def test_top_p_counts_what_top_k_left():
    """0.4 0.3 0.2 0.1: alone top_p=0.55 keeps two; of the first two (0.57, 0.43) it keeps one."""
    scores = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert row(scores, top_p=0.55) == {0, 1}
    assert row(scores, top_k=2, top_p=0.55) == {0}


def test_rows_are_cut_each_by_its_own_options():
    options = [dict(top_k=1), dict(), dict(top_p=0.3), dict(min_p=0.9), dict(temperature=0)]
    logits = torch.zeros(5, 6)
    logits[:, 4] = 1.0
    seen = [set() for _ in options]
    for seed in range(200):
        for i, token in enumerate(sample(logits, [sequence(seed=seed, **o) for o in options])):
            seen[i].add(token)
    assert seen == [{4}, set(range(6)), {4}, {4}, {4}]  # token 4 has 0.35


@pytest.mark.parametrize("params", [dict(temperature=0), dict(), dict(top_k=5, top_p=0.5, min_p=0.1)])
def test_a_vocabulary_of_one(params):
    assert sample([[0.3]], [sequence(**params)]) == [0]


@pytest.mark.parametrize("params", [dict(temperature=0), dict(), dict(top_k=5), dict(top_p=0.5), dict(temperature=1e4)])
def test_tokens_of_minus_infinity_are_never_drawn(params):
    logits = torch.full((VOCAB,), -math.inf)
    logits[[2, 9]] = torch.tensor([0.1, -0.1])
    assert {sample(logits, [sequence(seed=s, **params)])[0] for s in range(100)} <= {2, 9}


# penalties


def penalised(logits, prompt, output, params: SamplingParams) -> list[float]:
    result = list(logits)
    for token in set(prompt) | set(output):
        x = result[token]
        result[token] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    for token in set(output):
        result[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return result


@settings(max_examples=50)
@given(data=st.data())
def test_penalties_over_several_steps(data):
    """One sampler sees the sequences grow; every row is as if computed from the whole text."""
    number = st.integers(-8, 8).map(lambda x: x / 4)
    seqs = [
        sequence(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)), temperature=0,
                 repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 1.3, 4.0])),
                 presence_penalty=data.draw(number), frequency_penalty=data.draw(number))
        for _ in range(data.draw(st.integers(1, 3)))
    ]  # fmt: skip
    sampler = Sampler()
    for _ in range(6):
        rows = [seq for seq in seqs if data.draw(st.booleans())]  # not every sequence is in every batch
        if not rows:
            continue
        logits = [[data.draw(st.integers(-30, 30)) / 10 + i / 1000 for i in range(VOCAB)] for _ in rows]
        for seq, x, token in zip(rows, logits, sample(logits, rows, sampler), strict=True):
            n = seq.num_prompt_tokens
            want = penalised(x, seq.token_ids[:n], seq.token_ids[n:], seq.params)
            assert want[token] == pytest.approx(max(want), abs=1e-5)
            seq.token_ids.append(data.draw(st.integers(0, VOCAB - 1)))


def test_penalty_of_a_forbidden_token_stays_forbidden():
    logits = torch.tensor([-math.inf, 0.0, 1.0])
    got = sample(logits, [sequence([0], [0, 0], temperature=0, repetition_penalty=2.0, frequency_penalty=-2.0)])
    assert got == [2]


# min_tokens


@pytest.mark.parametrize("temperature", [0, 1])
def test_ends_are_impossible_before_min_tokens(temperature):
    logits = torch.tensor([0.0, 50.0, 40.0, -5.0])
    for done in range(5):
        seq = sequence([0, 0], [3] * done, temperature=temperature, min_tokens=3, ends=(1, 2))
        assert sample(logits, [seq]) == [0 if done < 3 else 1]


def test_finished_sequences_are_not_kept():
    """Penalty histories go with their sequence, but for those of the last batch."""
    sampler = Sampler()
    for i in range(10):
        sample([[0.0, 1.0]], [sequence([1], seed=i, presence_penalty=1.0)], sampler)
    assert len(sampler._histories) <= 1
