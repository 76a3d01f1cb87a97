"""Who has what: the parts of all ranks are the model, nothing twice but what is meant to be."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from nanoengine.loader.weights import dummy_weights, expected_tensors, read_weights
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.parallel.split import Split, check_split

LLAMA, QWEN, SMOL = (NAMED_CONFIGS[name] for name in ("tiny-llama", "tiny-qwen3", "smollm2-135m"))
ODD = dataclasses.replace(LLAMA, vocab_size=1023, intermediate_size=250, attention_bias=True, mlp_bias=True)
SHARED = [(LLAMA, 2), (LLAMA, 4), (LLAMA, 8), (QWEN, 2), (QWEN, 4), (SMOL, 3), (SMOL, 9), (ODD, 4), (ODD, 8)]


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (SMOL, 2, "tensor_parallel_size=2 does not divide the model's 9 query heads; 1, 3, 9 would do"),
        (LLAMA, 5, "tensor_parallel_size=5 does not divide the model's 8 query heads"),
        (LLAMA, 16, "tensor_parallel_size=16 does not divide the model's 8 query heads; 1, 2, 4, 8 would do"),
        (dataclasses.replace(SMOL, num_attention_heads=12), 2, "2 neither divides the .* 3 KV heads nor .*1, 3, 6"),
        (dataclasses.replace(SMOL, num_attention_heads=12), 4, "4 neither divides the model's 3 KV heads nor"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused_with_both_numbers(config, size, message):
    with pytest.raises(ValueError, match=message):
        check_split(config, size)


@pytest.mark.parametrize(("config", "size"), SHARED)
def test_each_query_head_is_somewhere_once_beside_the_kv_head_that_it_reads(config, size):
    group, seen = config.num_attention_heads // config.num_key_value_heads, []
    for rank in range(size):
        split = Split(config, rank, size)
        part = split.part()
        heads, kv_heads = range(8192)[split.heads], range(8192)[split.kv_heads]
        assert (part.num_attention_heads, part.num_key_value_heads) == (len(heads), len(kv_heads))
        local = len(heads) // len(kv_heads)
        for i, head in enumerate(heads):
            assert kv_heads[i // local] == head // group
        seen += heads
    assert seen == list(range(config.num_attention_heads))


@pytest.mark.parametrize(("config", "size"), SHARED)
def test_the_parts_joined_are_the_checkpoint(config, size, tmp_path):
    """By hand: each kind of tensor has its own way to be put together again."""
    whole = {name: torch.randn(shape) for name, shape in expected_tensors(config).items()}
    save_file(whole, tmp_path / "model.safetensors")
    parts = [dict(read_weights(tmp_path, config, Split(config, rank, size).shard)) for rank in range(size)]
    copies = max(1, size // config.num_key_value_heads)
    for name, tensor in whole.items():
        here = [part.get(name) for part in parts]
        leaf, kind = name.split(".")[-2:]
        if leaf in ("k_proj", "v_proj"):
            for first in range(0, size, copies):
                assert all(torch.equal(here[first], here[first + i]) for i in range(copies))
            joined = torch.cat(here[::copies])
        elif leaf in ("q_proj", "gate_proj", "up_proj"):
            joined = torch.cat(here)
        elif leaf in ("o_proj", "down_proj"):
            joined = here[0] if kind == "bias" else torch.cat(here, 1)
            assert kind == "weight" or here[1:] == [None] * (size - 1), "the bias would be added more than once"
        elif leaf in ("embed_tokens", "lm_head"):
            assert len({len(rows) for rows in here}) == 1, "a gather needs equal parts"
            joined = torch.cat(here)
            assert not joined[config.vocab_size :].any()
            joined = joined[: config.vocab_size]
        else:
            assert all(torch.equal(part, tensor) for part in here)
            continue
        assert torch.equal(joined, tensor), name


def test_only_the_part_is_read():
    """What a rank asks of the file is its share, and norms: counted by a source that notes what is indexed."""
    read = {}

    class Source:
        def __init__(self, name, tensor):
            self.name, self.tensor = name, tensor

        def __getitem__(self, index):
            read[self.name] = self.tensor[index]
            return read[self.name]

    whole = dict(dummy_weights(LLAMA))
    for rank in range(4):
        read.clear()
        parts = {name: Split(LLAMA, rank, 4).shard(name, Source(name, tensor)) for name, tensor in whole.items()}
        assert sum(t.nbytes for t in read.values()) == sum(t.nbytes for t in parts.values())
        bytes_of = lambda kind: sum(t.nbytes for name, t in read.items() if kind in name)  # noqa: E731
        assert 4 * bytes_of("mlp") == sum(t.nbytes for name, t in whole.items() if "mlp" in name)
        assert 2 * bytes_of("k_proj") == sum(t.nbytes for name, t in whole.items() if "k_proj" in name)
        assert 4 * bytes_of("lm_head") == whole["lm_head.weight"].nbytes


def test_random_weights_are_the_same_numbers_however_they_are_cut():
    whole = dict(dummy_weights(QWEN))
    for rank in range(2):
        split = Split(QWEN, rank, 2)
        for name, part in dummy_weights(QWEN, take=split.shard):
            assert torch.equal(part, split.shard(name, whole[name]))
