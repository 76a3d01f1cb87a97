"""Small GGUF files, written as llama.cpp's converter writes them, from a transformers model's weights."""

from pathlib import Path

import gguf
import numpy as np

from nanoengine.tokenizer.tokenizer import byte_alphabet

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("1", "2"), ("12", "3"), ("Ġ", "a"), ("'", "s")]
TOKENS = [*SPECIAL, *byte_alphabet(), *(a + b for a, b in MERGES), "<think>", "[PAD0]"]
KINDS = [3] * len(SPECIAL) + [1] * (256 + len(MERGES)) + [4, 5]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for hf in sorted(NAMES, key=len, reverse=True):
        name = name.replace(f".{hf}.", f".{NAMES[hf]}.") if name.startswith("blk.") else name.replace(hf, NAMES[hf])
    return name


def llama_cpp_order(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i of a head's first half goes to 2i, row i of its second half to 2i + 1 (written without reshape)."""
    out = np.empty_like(rows)
    dim = len(rows) // num_heads
    for row in range(len(rows)):
        head, within = divmod(row, dim)
        half, i = divmod(within, dim // 2)
        out[head * dim + 2 * i + half] = rows[row]
    return out


def hf_model(arch: str, **options):
    """A random model with sizes at which every mistake in a shape shows."""
    import torch
    import transformers

    kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
    sizes = {
        "vocab_size": len(TOKENS),
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "head_dim": 24,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kinds[arch](**(sizes | options)), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # transformers' own start is 1 for norms and 0 for biases
            parameter.normal_(0.0, 0.2)
    return model.eval()


def write_gguf(path: Path, arch: str, tensors: dict[str, np.ndarray], *, heads=(4, 2), quant="F32", without=(), **keys):
    """Write ``tensors`` (Hugging Face names). keys: metadata to replace or, if None, leave out; quant: of matrices."""
    metadata = {
        "block_count": 2, "context_length": 512, "embedding_length": 96, "feed_forward_length": 160,
        "attention.head_count": heads[0], "attention.head_count_kv": heads[1], "attention.key_length": 24,
        "attention.value_length": 24, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5,
    }  # fmt: skip
    tokenizer = {
        "model": "gpt2", "pre": "smollm", "tokens": TOKENS, "token_type": KINDS, "bos_token_id": 1, "eos_token_id": 2,
        "merges": [" ".join(pair) for pair in MERGES],
    }  # fmt: skip
    values = {f"{arch}.{k}": v for k, v in metadata.items()} | {f"tokenizer.ggml.{k}": v for k, v in tokenizer.items()}
    values |= {"tokenizer.chat_template": TEMPLATE} | {k.replace("__", "."): v for k, v in keys.items()}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        _add(writer, key, value)
    for name, array in tensors.items():
        short = gguf_name(name)
        if short in without:
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            array = llama_cpp_order(array, heads["k_proj" in name])
        _add_tensor(writer, short, array, quant if array.ndim > 1 else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value) -> None:
    if value is None:
        return
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kinds[type(value)](key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, quant: str) -> None:
    kind = gguf.GGMLQuantizationType[quant]
    if quant in ("F32", "F16"):
        writer.add_tensor(name, np.ascontiguousarray(array.astype(np.float32 if quant == "F32" else np.float16)))
    else:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)


def arrays(model, tied: bool = False) -> dict[str, np.ndarray]:
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return {name: a for name, a in state.items() if not (tied and name == "lm_head.weight")}
