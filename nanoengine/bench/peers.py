"""transformers' generate on our engine's workload, in the same process and run."""

from __future__ import annotations

import time

from nanoengine.bench.workload import Workload
from nanoengine.model.config import ModelConfig, model_type


def huggingface_model(config: ModelConfig, device: str, dtype, attn_implementation: str = "sdpa"):
    """transformers' own model of this shape, its weights as transformers draws them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
             "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta",
             "tie_word_embeddings", "attention_bias", "mlp_bias")  # fmt: skip
    shape = {name: getattr(config, name) for name in names}
    kind = AutoConfig.for_model(model_type(config), **shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(kind, dtype=dtype, attn_implementation=attn_implementation)
    return model.eval()


def static_batches(workload: Workload, size: int) -> list[tuple[list[list[int]], int, list[int]]]:
    """(prompts, new tokens that every row gets, new tokens that were asked for) of each batch, in order of arrival."""
    pairs = list(zip(workload.prompts, workload.output_lens, strict=True))
    batches = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    return [([p for p, _ in batch], max(n for _, n in batch), [n for _, n in batch]) for batch in batches]


def generate_statically(model, workload: Workload, batch_size: int, temperature: float = 0.6) -> dict:
    """Run the workload through ``model.generate`` in padded batches; only tokens that were asked for count.

    A batch runs until its longest answer is done, as a loop around generate does. Returns seconds,
    output_tok_s and the tokens that were computed in vain.
    """
    import torch

    device = next(model.parameters()).device
    wanted = computed = 0
    model.generation_config.eos_token_id = None  # else rows would end at will
    model.generation_config.pad_token_id = 0
    _wait(device)
    start = time.perf_counter()
    for prompts, new_tokens, asked in static_batches(workload, batch_size):
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
                                 max_new_tokens=new_tokens)  # fmt: skip
        if out.shape != (len(prompts), longest + new_tokens):
            raise RuntimeError(f"generate returned {tuple(out.shape)}, expected {(len(prompts), longest + new_tokens)}")
        wanted, computed = wanted + sum(asked), computed + out.shape[0] * new_tokens
    _wait(device)
    seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 2), "output_tok_s": round(wanted / seconds, 1), "batch_size": batch_size,
            "tokens_in_vain": computed - wanted}  # fmt: skip


def transformers_beside(config: ModelConfig, workload: Workload, batch_size: int = 128, device: str = "cuda") -> dict:
    """transformers on ``workload``: bf16, SDPA attention, a short warm-up, one run."""
    import torch
    import transformers

    model = huggingface_model(config, device, torch.bfloat16)
    warm = Workload("warm-up", [prompt[:64] for prompt in workload.prompts[:4]], [8] * len(workload.prompts[:4]))
    generate_statically(model, warm, 4)
    return {"transformers": transformers.__version__} | generate_statically(model, workload, batch_size)


def _wait(device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
