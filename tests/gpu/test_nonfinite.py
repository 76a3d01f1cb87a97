"""A row of NaN on a GPU: its request ends, its mates do not notice, and the GPU lives.

The interpreter cannot show it: compiled, an argmax over NaN may name a token that does not exist.
``pytest tests/gpu -k nonfinite`` runs all that is about it.
"""

import pytest
import torch

from nanoengine import LLM, SamplingParams
from nanoengine.engine.protocols import NO_TOKEN, NON_FINITE

NAN, INF = float("nan"), float("inf")
BAD = 100
MATES = [[1, 5, 7] * 8, [9, 8] * 12, [33], [40, 41] * 20]
WRONG = [3, BAD, 4] * 8
TINY = dict(load_format="dummy", max_model_len=256, num_blocks=200)
KINDS = {
    "greedy": dict(temperature=0),
    "drawn": dict(temperature=0.8),
    "logprobs": dict(temperature=0.8, logprobs=2),
    "truncated": dict(temperature=0.8, top_p=0.9, top_k=50),
    "penalised": dict(temperature=0, repetition_penalty=1.2),
    "held": dict(temperature=0.8, min_tokens=3),
}
WAYS = {
    "plain": dict(attention="torch", fused_kernels=False, enforce_eager=True),
    "eager": dict(enforce_eager=True),
    "graphs": {},
    "chunked": dict(max_num_batched_tokens=16),
    "a large step": dict(max_num_batched_tokens=8192, enable_prefix_caching=False),
}


def params(i, **kind):
    return SamplingParams(**{"seed": i, "max_tokens": 9, "ignore_eos": True} | kind)


def generate(llm, prompts, numbers, **kind):
    made = [params(i, **kind) for i in numbers]
    return llm.generate([dict(prompt_token_ids=p) for p in prompts], made, use_tqdm=False)


@pytest.mark.parametrize("model", ["tiny-llama", "qwen3-0.6b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_nonfinite_logits_end_one_request(way, overlap, dtype, model):
    """In float32 the mates' tokens are those that they have without it; in 16 bits a row's sums depend on the size of
    its batch, so the next test compares batches of equal sizes."""
    if model != "tiny-llama" and (way != "graphs" or dtype == "float32"):
        return  # the large vocabulary, 151,936 tokens, where it matters
    with LLM(model, dtype=dtype, overlap=overlap, **TINY | WAYS[way]) as llm:
        weights, manager = llm.engine.runner.model, llm.engine.block_manager
        untied = not weights.tied
        for name, kind in KINDS.items():
            prompts, numbers = [*MATES[:2], WRONG, *MATES[2:]], [0, 1, 9, 2, 3]
            manager.reset()
            sound = generate(llm, MATES, [0, 1, 2, 3], **kind)
            assert not untied or not any(BAD in out.token_ids for out in sound)
            kept = weights.embed_tokens.weight.data[BAD].clone()
            weights.embed_tokens.weight.data[BAD] = NAN
            if not untied:  # it is the head's row, too: everyone ends, and none with a token beyond the vocabulary
                outputs = generate(llm, prompts, numbers, **kind)
                assert {(out.finish_reason, len(out.token_ids)) for out in outputs} == {("error", 0)}
                weights.embed_tokens.weight.data[BAD] = kept
                assert [o.finish_reason for o in generate(llm, MATES, [0, 1, 2, 3], **kind)] == ["length"] * 4
                continue
            manager.reset()
            outputs = generate(llm, prompts, numbers, **kind)
            bad = outputs.pop(2)
            assert (bad.finish_reason, bad.token_ids) == ("error", []), name
            assert "non-finite logits" in bad.error
            assert [out.finish_reason for out in outputs] == ["length"] * 4
            if dtype == "float32":
                assert [o.token_ids for o in outputs] == [o.token_ids for o in sound], name
            assert all(0 <= token < 1024 for out in outputs for token in out.token_ids)
            weights.embed_tokens.weight.data[BAD] = kept
            healed, = generate(llm, [WRONG], [9], temperature=0, max_tokens=1)
            assert healed.num_cached_tokens == 0 and healed.finish_reason == "length"
            manager.check_invariants([])
        assert manager.num_free_blocks == manager.num_blocks


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_nonfinite_logits_leave_the_mates_tokens(kind, eager, overlap, dtype):
    """In 16 bits: the same batch twice, the second time with a bad row in it, so that all sizes are equal.

    The bad request asks for one token only, so that both batches shrink at the same step."""
    with LLM("tiny-llama", dtype=dtype, overlap=overlap, enforce_eager=eager, enable_prefix_caching=False,
             **TINY) as llm:  # fmt: skip
        embedding, found = llm.engine.runner.model.embed_tokens.weight.data, []
        for value in (0.01, NAN):
            embedding[BAD] = value
            made = [params(i, **KINDS[kind]) for i in range(4)]
            made.insert(2, params(9, **KINDS[kind] | dict(max_tokens=1)))
            prompts = [dict(prompt_token_ids=p) for p in [*MATES[:2], WRONG, *MATES[2:]]]
            outputs = llm.generate(prompts, made, use_tqdm=False)
            found.append((outputs.pop(2).finish_reason, [out.token_ids for out in outputs]))
        assert [reason for reason, _ in found] == ["length", "error"]
        assert found[0][1] == found[1][1]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_nonfinite_logits_that_come_with_a_drawn_token(kind, overlap, eager):
    """The step behind the bad one is launched before the host has heard of it, and is fed on the GPU."""
    with LLM("tiny-llama", dtype="float32", overlap=overlap, enforce_eager=eager, **TINY) as llm:
        mine, mate = generate(llm, MATES[:2], [0, 1], **KINDS[kind])
        token = next(t for t in mine.token_ids[2:-2] if t not in mate.token_ids + MATES[0] + MATES[1])
        at = mine.token_ids.index(token)
        llm.engine.runner.model.embed_tokens.weight.data[token] = NAN
        llm.engine.block_manager.reset()
        bad, same = generate(llm, MATES[:2], [0, 1], **KINDS[kind])
        assert (bad.finish_reason, bad.token_ids) == ("error", mine.token_ids[: at + 1])
        assert same.token_ids == mate.token_ids
        torch.cuda.synchronize()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("overlap", [0, 1])
def test_nonfinite_by_overflow_of_float16(overlap, eager):
    """What happens on a T4: finite weights, and a sum beyond 65,504."""
    with LLM("tiny-llama", dtype="float16", overlap=overlap, enforce_eager=eager, **TINY) as llm:
        weights = llm.engine.runner.model
        wanted = generate(llm, MATES, range(4), temperature=0)
        llm.engine.block_manager.reset()
        weights.embed_tokens.weight.data[BAD] = INF
        bad, *mates = generate(llm, [WRONG, *MATES], [7, *range(4)], temperature=0)
        assert bad.finish_reason == "error"
        assert [out.finish_reason for out in mates] == ["length"] * 4 == [out.finish_reason for out in wanted]
        weights.lm_head.weight.data.mul_(5e5)  # finite, but logits of 100,000: +inf in each row
        outputs = generate(llm, MATES, range(4), temperature=0.7)
        assert {(out.finish_reason, len(out.token_ids)) for out in outputs} == {("error", 0)}


@pytest.mark.parametrize("vocab", [1, 2047, 2048, 2049, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nonfinite_rows_of_the_draw(vocab, dtype):
    """Every kind of bad value at every kind of place, greedy and drawn, beside sound rows."""
    from nanoengine.kernels.gumbel_sample import gumbel_sample

    most = torch.finfo(dtype).max
    places = sorted({0, vocab // 2, vocab - 1, min(vocab - 1, 2047), min(vocab - 1, 2048)})
    cases = [(slice(None), NAN, NON_FINITE), (slice(None), INF, NON_FINITE), (slice(None), -INF, NO_TOKEN)]
    cases += [(place, value, NON_FINITE) for place in places for value in (NAN, -NAN, INF)]
    cases += [(slice(None), most, None), (slice(None), -most, None), (0, most, None), (0, -most, None)]
    for temperature in (0.0, 1e-300, 0.7, 1e4):
        logits = (torch.randn(len(cases) + 1, vocab, device="cuda") * 3).to(dtype)
        for row, (place, value, _) in zip(logits, cases, strict=False):
            row[place] = value
        temperatures = torch.full((len(logits),), temperature, dtype=torch.float64, device="cuda")
        seeds = torch.arange(len(logits), device="cuda")
        out = torch.full((len(logits),), -9, device="cuda")
        gumbel_sample(logits, temperatures, seeds, seeds, out)
        for token, (_, _, wanted) in zip(out.tolist(), [*cases, (0, 0, None)], strict=True):
            assert token == wanted if wanted is not None else 0 <= token < vocab


def test_nonfinite_logits_do_not_make_the_host_wait():
    with LLM("tiny-llama", **TINY) as llm:
        llm.engine.runner.model.embed_tokens.weight.data[BAD] = NAN
        for i, kind in enumerate(KINDS.values()):
            if kind.get("logprobs") is None and "repetition_penalty" not in kind:
                llm.engine.add_request([1, 2, 3, i], params(i, **kind | dict(max_tokens=200)))
        for _ in range(4):
            llm.engine.step()
        failed = []
        torch.cuda.set_sync_debug_mode("error")
        try:
            for i in range(40):
                if i % 10 == 5:
                    failed.append(llm.engine.add_request([5, BAD, i], params(i, **[*KINDS.values()][i // 10 % 2])))
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert {seq.finish_reason for seq in failed} == {"error"}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("token", [1024, 2**40, -7])
def test_nonfinite_cousin_a_sampler_that_leaves_the_vocabulary(token, eager):
    """A RuntimeError that names the id, no CUDA error: the next request is served."""

    def leaves(logits, seqs, positions):
        tokens = logits.argmax(-1)
        tokens[[i for i, seq in enumerate(seqs) if seq.num_prompt_tokens == 3]] = token
        return tokens

    with LLM("tiny-llama", sampler=leaves, enforce_eager=eager, **TINY) as llm:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"token id {token}, outside the vocabulary \[0, 1024\)"):
                generate(llm, [[1, 2, 3], [4, 5]], [0, 1])
            torch.cuda.synchronize()
            out, = generate(llm, [[4, 5]], [0])
            assert out.finish_reason == "length"


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_an_innocent_prompt_with_the_same_beginning_goes_on(way, overlap):
    """In a kernel's tile what is masked counts as 0 * NaN: KV before the bad token may be NaN, too."""
    same = [1 + i % 50 for i in range(40)]
    prompts, numbers = [[*same, BAD, *[3] * 20], same + [9] * 3, same + [8] * 3], [0, 1, 2]
    settings = dict(dtype="float32", block_size=16, overlap=overlap)
    with LLM("tiny-llama", **TINY | WAYS[way] | settings) as llm:
        weights = llm.engine.runner.model
        sound = generate(llm, prompts[1:], numbers[1:], temperature=0)
        assert llm.reset_prefix_cache()
        weights.embed_tokens.weight.data[BAD] = NAN
        bad, *mates = generate(llm, prompts, numbers, temperature=0)
        assert bad.finish_reason == "error"
        for out, want in zip(mates, sound, strict=True):
            assert (out.token_ids, out.error) == (want.token_ids, None)
