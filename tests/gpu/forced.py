"""Teacher forcing through the whole engine: every way to run the model is fed the same tokens and tells its logits."""

import random
from contextlib import contextmanager
from unittest.mock import patch

import torch

from nanoengine import LLM, SamplingParams
from nanoengine.loader import weights
from nanoengine.worker import model_runner


class Forced:
    """A sampler that writes the logits down and answers with the next token of a given text."""

    def __init__(self, texts):
        self.texts = {tuple(text[:4]): text for text in texts}
        self.logits = {}

    def __call__(self, logits, seqs, positions):
        answer = []
        for row, seq, position in zip(logits, seqs, positions.tolist(), strict=True):
            key = tuple(seq.token_ids[:4])
            self.logits[key, position] = row.clone()
            answer.append(self.texts[key][position])
        return torch.tensor(answer, device=logits.device)


def texts(num, length, seed=0, vocab=1000):
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for _ in range(num)]


def forced_logits(name, wanted, prompt_len, *, rounds=1, load_format="dummy", **settings):
    """{(text number, position): logits [vocabulary]} of the tokens after each prompt, and the LLM's counters."""
    sampler = Forced(wanted)
    params = [SamplingParams(max_tokens=len(text) - prompt_len, ignore_eos=True) for text in wanted]
    with LLM(name, load_format=load_format, sampler=sampler, max_model_len=1024, **settings) as llm:
        for _ in range(rounds):
            sampler.logits.clear()
            prompts = [dict(prompt_token_ids=text[:prompt_len]) for text in wanted]
            outputs = llm.generate(prompts, params, use_tqdm=False)
        engine = llm.engine
        facts = dict(preemptions=engine.scheduler.num_preemptions, cached=outputs[0].num_cached_tokens,
                     backend=engine.runner.attention.name, block_size=engine.block_manager.block_size)  # fmt: skip
    keys = {tuple(text[:4]): number for number, text in enumerate(wanted)}
    return {(keys[key], position): row for (key, position), row in sampler.logits.items()}, facts


def largest_error(found, wanted) -> float:
    assert found.keys() == wanted.keys()
    return max(float((row.float() - wanted[key].float()).abs().max()) for key, row in found.items())


def compare(found, wanted, bound):
    """(largest error, share of steps whose top-2 margin exceeds the bound); the argmax must agree there."""
    worst, decided = largest_error(found, wanted), 0
    for key, row in found.items():
        reference = wanted[key].float()
        first, second = reference.topk(2).values.tolist()
        if first - second > bound:
            decided += 1
            assert int(row.argmax()) == int(reference.argmax()), key
    assert worst <= bound, worst
    return worst, decided / len(found)


@contextmanager
def weights_rounded_to(dtype):
    """Random weights come as ``dtype`` would have them, in whatever format the model then is: a reference in float32
    for a model in bfloat16."""
    drawn = model_runner.dummy_weights

    def rounded(config, **how):
        return ((name, weight.to(dtype)) for name, weight in drawn(config, **how | {"dtype": dtype}))

    with patch.object(model_runner, "dummy_weights", rounded):
        yield


@contextmanager
def large_biases(factor: float = 20.0):
    """Random biases of the size of what they are added to, for our models and transformers': one lost is seen."""
    drawn = weights.dummy_weights

    def larger(config, *arguments, **how):
        return ((name, value * (factor if name.endswith(".bias") else 1))
                for name, value in drawn(config, *arguments, **how))  # fmt: skip

    with patch.object(model_runner, "dummy_weights", larger), patch.object(weights, "dummy_weights", larger):
        yield


def huggingface_logits(name, wanted, prompt_len, dtype):
    """Logits of transformers' own model with the same dummy weights, one forward pass a text, in float32."""
    from nanoengine.bench.peers import huggingface_model
    from nanoengine.loader.weights import dummy_weights
    from nanoengine.model.config import NAMED_CONFIGS

    c = NAMED_CONFIGS[name]
    model = huggingface_model(c, "cpu", torch.float32, "eager")
    values = dict(dummy_weights(c, dtype=dtype, device="cuda"))
    missing, unexpected = model.cuda().load_state_dict({k: w.float() for k, w in values.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model = model.float().eval()
    logits = {}
    with torch.inference_mode():
        for number, text in enumerate(wanted):
            rows = model(torch.tensor([text], device="cuda")).logits[0]
            logits |= {(number, position): rows[position - 1] for position in range(prompt_len, len(text))}
    return logits
