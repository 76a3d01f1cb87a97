"""One engine in a process of its own: ``python -m nanoengine.bench.worker ours|hf MODEL THREADS``.

Reads one JSON request a line from stdin, {"prompts": [[ids]], "new_tokens": n}, and answers
with {"seconds": s, "tokens": [[ids]]}; {"peak": true} is answered with {"peak_mib": m}. An error is
answered with {"error": text}. A process an engine, because only so its memory can be told apart.
"""

from __future__ import annotations

import json
import os
import sys
import time


class Ours:
    """nanoengine: greedy, end tokens ignored, no prefix cache (each run must do the whole work)."""

    def __init__(self, model: str):
        from nanoengine import LLM

        self.llm = LLM(model, device="cpu", dtype="float32", enable_prefix_caching=False)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        from nanoengine import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        return [out.token_ids for out in self.llm.generate(prompts, params, use_tqdm=False)]


class HuggingFace:
    """transformers' generate: greedy, no end token, several prompts padded on the left to the longest."""

    def __init__(self, model: str):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # else rows would end, and others be padded, at will
        self.model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = self.torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = self.torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with self.torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens)
        return out[:, longest:].tolist()


ENGINES = {"ours": Ours, "hf": HuggingFace}


def main(name: str, model: str, threads: str) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the replies
    import torch

    torch.set_num_threads(int(threads))
    try:
        engine = ENGINES[name](model)
    except Exception as error:
        return _reply(replies, {"error": f"{type(error).__name__}: {error}"})
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        try:
            _reply(replies, _serve(engine, json.loads(line)))
        except Exception as error:
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})


def _serve(engine, request: dict) -> dict:
    if request.get("peak"):
        return {"peak_mib": peak_mib()}
    began = time.perf_counter()
    tokens = engine.generate(request["prompts"], request["new_tokens"])
    return {"seconds": time.perf_counter() - began, "tokens": tokens}


def _reply(file, message: dict) -> None:
    print(json.dumps(message), file=file, flush=True)


def peak_mib() -> float | None:
    """The most memory this process ever held (resident set), in MiB; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
