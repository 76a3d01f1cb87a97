"""logit_bias, allowed_token_ids, bad_words and prompt_logprobs against transformers' processors and logits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from transformers import RepetitionPenaltyLogitsProcessor as RepetitionPenalty

from nanoengine import LLM, EngineConfig, LLMEngine, SamplingParams
from nanoengine.loader.weights import dummy_weights
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.model.decoder import Decoder, full_forward
from nanoengine.runners import make_runner
from nanoengine.sampling_params import with_bad_words_ids
from nanoengine.worker.prompt_logprobs import ROWS
from nanoengine.worker.sampler import Sampler
from tests.model.test_sampler import sequence

VOCAB = 1024
INF = float("inf")


# one step of the sampler against transformers


def random_options(rng: random.Random, vocab: int) -> dict:
    """Some of the options at once; bad words of one to three tokens out of a few, so that their prefixes do stand."""
    options: dict = {}
    if rng.random() < 0.5:
        ids = rng.sample(range(vocab), rng.randint(1, 6))
        options["logit_bias"] = {i: rng.choice([-100, -3.5, 0.25, 7, 100]) for i in ids}
    if rng.random() < 0.4:
        options["allowed_token_ids"] = rng.sample(range(vocab), rng.randint(4, vocab))
    if rng.random() < 0.6:
        options["bad_words_ids"] = [
            [rng.randrange(4) for _ in range(rng.randint(1, 3))] for _ in range(5)
        ]
    if rng.random() < 0.4:
        options["repetition_penalty"] = rng.choice([0.5, 1.7])
    return options


def transformers_scores(row: torch.Tensor, seq) -> torch.Tensor:
    """The row after transformers' processors, in the order that SamplingParams states."""
    p, scores = seq.params, row[None].clone()
    everything = torch.tensor([seq.token_ids])
    output = torch.tensor(
        [seq.output_ids], dtype=torch.int64
    )  # bad words are looked for in the output alone
    if p.logit_bias:
        scores = SequenceBiasLogitsProcessor([[[i], float(b)] for i, b in p.logit_bias.items()])(
            everything, scores
        )
    if p.repetition_penalty != 1:
        scores = RepetitionPenalty(p.repetition_penalty)(everything, scores)
    if p.allowed_token_ids is not None:
        kept = torch.full_like(scores, -INF)
        kept[:, list(p.allowed_token_ids)] = scores[:, list(p.allowed_token_ids)]
        scores = kept
    if p.bad_words_ids:
        scores = NoBadWordsLogitsProcessor([list(w) for w in p.bad_words_ids])(output, scores)
    return scores[0]


@pytest.mark.parametrize("seed", range(30))
def test_a_mixed_batch_has_the_scores_of_transformers_row_by_row(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab = 12
    seqs = [
        sequence(
            [rng.randrange(4) for _ in range(rng.randint(1, 4))],
            [rng.randrange(4) for _ in range(rng.randint(0, 4))],
            temperature=0,
            **(random_options(rng, vocab) if i % 3 else {}),
        )
        for i in range(9)
    ]
    logits = torch.randn(len(seqs), vocab, generator=generator) * 3
    wanted = [transformers_scores(row, seq) for row, seq in zip(logits, seqs, strict=True)]
    found, positions = logits.clone(), np.array([len(seq.token_ids) for seq in seqs], np.int64)
    tokens = Sampler()(found, seqs, positions)
    for i, row in enumerate(wanted):
        torch.testing.assert_close(found[i], row)
        if row.max() > -INF:
            assert tokens[i] == row.argmax()
        if not i % 3:
            assert torch.equal(found[i], logits[i]), "a row that asks for nothing is left alone"


def test_a_ban_stands_whatever_else_is_asked():
    logits = torch.tensor([[5.0, 1.0, 0.0, -1.0]])
    most = dict(
        logit_bias={0: 100, 1: 100}, frequency_penalty=-2.0, repetition_penalty=1e-44, temperature=0
    )
    banned = sequence([0], [0, 1], allowed_token_ids=[1, 2, 3], bad_words_ids=[[0, 1, 1]], **most)
    assert Sampler()(logits.clone(), [banned], np.array([3])).tolist() == [2]


def test_a_bad_word_counts_what_was_generated_and_not_the_prompt():
    logits, word = torch.tensor([[0.0, 0.0, 9.0, 8.0]]), [[1, 2]]
    for prompt, output, token in (([0, 1], [], 2), ([0], [1], 3), ([1], [0], 2), ([1], [1, 1], 3)):
        seq = sequence(prompt, output, temperature=0, bad_words_ids=word)
        assert Sampler()(logits.clone(), [seq], np.array([len(seq.token_ids)])).tolist() == [token]


# through the engine


@pytest.fixture(scope="module")
def model() -> Decoder:
    decoder = Decoder(NAMED_CONFIGS["tiny-qwen3"], 256)
    decoder.load_weights(
        (name, value * 4 if value.dim() == 2 else value)
        for name, value in dummy_weights(NAMED_CONFIGS["tiny-qwen3"])
    )
    return decoder.eval()


def engine(model, **settings) -> LLMEngine:
    settings = (
        dict(max_model_len=256, vocab_size=VOCAB, device="cpu", block_size=4, num_blocks=300)
        | settings
    )
    config = EngineConfig(**settings)
    return LLMEngine(config, make_runner(config, model=model))


def run(eng: LLMEngine, requests) -> list:
    seqs = [eng.add_request(prompt, params) for prompt, params in requests]
    for _ in eng.run():
        eng.block_manager.check_invariants(eng.sequences.values())
    return seqs


def requests() -> list:
    rng = random.Random(5)
    kinds = [
        dict(temperature=0),
        dict(prompt_logprobs=3, temperature=0),
        dict(logit_bias=dict.fromkeys(range(0, VOCAB, 3), 4.0), temperature=0.9),
        dict(allowed_token_ids=range(100, 300), temperature=0, prompt_logprobs=0),
        dict(
            bad_words_ids=[[a, b] for a in range(0, VOCAB, 9) for b in range(2, 300, 50)],
            temperature=0,
        ),
        dict(temperature=1.2, top_k=40),
        dict(allowed_token_ids=[5, 6, 7], bad_words_ids=[[5, 6], [6, 7], [7, 5]], temperature=1.0),
        dict(prompt_logprobs=5, logprobs=2, temperature=1.0, repetition_penalty=1.4),
    ]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in kinds]
    prompts[7] = prompts[1] = [
        rng.randrange(VOCAB) for _ in range(2 * ROWS + 1)
    ]  # in three parts; shared blocks
    return [
        (prompt, SamplingParams(seed=i, max_tokens=12, ignore_eos=True, **kind))
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    return [run(engine(model), [request])[0].output_ids for request in requests()]


SETTINGS = [
    dict(),
    dict(overlap=1),
    dict(max_num_batched_tokens=7, overlap=1),
    dict(num_blocks=48, max_num_batched_tokens=9),
    dict(num_blocks=48, overlap=1, policy="prefill_first"),
    dict(max_num_seqs=3, block_size=1, num_blocks=160, overlap=1),
]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "batched"
)
def test_options_hold_in_any_batch_chunked_preempted_overlapped(model, alone, settings):
    eng = engine(model, **settings)
    run(
        eng, [(prompt, SamplingParams(max_tokens=1)) for prompt, _ in requests()]
    )  # fills the prefix cache
    seqs = run(eng, requests())
    assert [seq.output_ids for seq in seqs] == alone
    if settings.get("num_blocks") == 48:
        assert eng.scheduler.num_preemptions > 0
    for seq in seqs:
        check_prompt_logprobs(full_forward(model, seq.token_ids[: seq.num_prompt_tokens]), seq)
    assert set(seqs[3].output_ids) <= set(range(100, 300))
    steps = {(b - a) % 3 for a, b in zip(seqs[6].output_ids, seqs[6].output_ids[1:], strict=False)}
    assert set(seqs[6].output_ids) <= {5, 6, 7} and steps <= {0, 2}, "5 6, 6 7 and 7 5 are banned"


def check_prompt_logprobs(logits: torch.Tensor, seq, tolerance=1e-3) -> None:
    """logits [prompt, vocabulary]: the model's own, computed at once and without a cache."""
    k, entries = seq.params.prompt_logprobs, seq.prompt_logprobs
    if k is None:
        assert entries is None
        return
    assert len(entries) == seq.num_prompt_tokens and entries[0] is None
    assert seq.num_cached_tokens == 0, "it reads nothing from the prefix cache"
    expected = logits.float().log_softmax(-1)
    for position, entry in enumerate(entries[1:], 1):
        row, own = expected[position - 1], seq.token_ids[position]
        assert own in entry and k <= len(entry) <= k + 1
        assert all(abs(row[token].item() - value) < tolerance for token, value in entry.items())
        if k:
            assert min(sorted(entry.values())[-k:]) > row.topk(k).values[-1].item() - tolerance


def test_prompt_logprobs_are_those_of_transformers(embedded_folder):
    theirs = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32).eval()
    with LLM(
        max_model_len=128, device="cpu", max_num_batched_tokens=16, num_blocks=32, block_size=4
    ) as llm:
        text = "The capital of France is Paris, and the capital of Italy is"
        params = [
            SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2),
            SamplingParams(max_tokens=2),
        ]
        out, plain = llm.generate([text, text], params, use_tqdm=False)
        assert plain.prompt_logprobs is None
        with torch.no_grad():
            expected = theirs(torch.tensor([out.prompt_token_ids])).logits[0].log_softmax(-1)
        assert (
            len(out.prompt_logprobs) == len(out.prompt_token_ids) and out.prompt_logprobs[0] is None
        )
        for row, token, entry in zip(
            expected, out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=False
        ):
            assert {*row.topk(2).indices.tolist(), token} == set(entry)
            assert all(
                value == pytest.approx(row[i].item(), abs=1e-3) for i, value in entry.items()
            )
        again = llm.generate(text, SamplingParams(max_tokens=1), use_tqdm=False)[0]
        assert again.num_cached_tokens > 0, "it may write to the prefix cache"


def test_a_sampler_of_your_own_must_name_what_it_has(model):
    class Own:
        def __call__(self, logits, seqs, positions):
            return logits.argmax(-1)

    config = EngineConfig(max_model_len=64, vocab_size=VOCAB, device="cpu", num_blocks=20)
    eng = LLMEngine(config, make_runner(config, model=model, sampler=Own()))
    for option in (dict(logit_bias={1: 1}), dict(allowed_token_ids=[1]), dict(bad_words_ids=[[1]])):
        with pytest.raises(
            ValueError,
            match=f"{[*option][0].removesuffix('_ids')}.* not supported by ModelRunner and",
        ):
            eng.add_request([1], SamplingParams(**option))
    assert (
        len(
            run(eng, [([1, 2], SamplingParams(prompt_logprobs=1, max_tokens=1))])[0].prompt_logprobs
        )
        == 2
    )


# bad words as texts


def test_bad_words_are_banned_with_and_without_a_blank(smollm):
    found = with_bad_words_ids(SamplingParams(bad_words=["Paris", " cat", "Paris"]), smollm.encode)
    forms = ["Paris", " Paris", "cat", " cat"]
    assert found.bad_words_ids == tuple(
        tuple(smollm.encode(text, add_special_tokens=False)) for text in forms
    )
    several = with_bad_words_ids(SamplingParams(bad_words=["xqzvw kjh"]), smollm.encode)
    assert several.bad_words_ids[0] == tuple(smollm.encode("xqzvw kjh")) and several.needs_history
    assert not with_bad_words_ids(SamplingParams(bad_words=["cat"]), smollm.encode).needs_history
    assert with_bad_words_ids(found, None) is found, "what is given is taken as it is"
    with pytest.raises(
        ValueError, match="bad_words holds 'x', which the tokenizer turns into no token"
    ):
        with_bad_words_ids(SamplingParams(bad_words=["x"]), lambda text, add_special_tokens: [])


def test_generated_text_holds_no_bad_word():
    with LLM(max_model_len=128, device="cpu", num_blocks=32) as llm:
        ask, words = "The capital of France is", []
        for _ in range(4):
            [out] = llm.generate(
                ask, SamplingParams(temperature=0, max_tokens=8, bad_words=words), use_tqdm=False
            )
            assert not any(word in out.text for word in words)
            words.append(out.text.split()[0])
        assert len(set(words)) == 4
