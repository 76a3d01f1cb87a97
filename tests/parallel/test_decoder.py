"""Several ranks' decoders against one: biases, vocabularies, copied KV heads. Ranks are threads."""

import dataclasses
import itertools

import pytest
import torch

from nanoengine.attention.torch_attention import dense_attention
from nanoengine.config import EngineConfig
from nanoengine.loader.resolve import ModelFiles
from nanoengine.loader.weights import expected_tensors
from nanoengine.model.config import NAMED_CONFIGS
from nanoengine.model.decoder import Decoder, full_forward
from nanoengine.parallel.decoder import ParallelDecoder, load_part
from nanoengine.parallel.split import Split
from nanoengine.worker.model_runner import ModelRunner
from tests.parallel.ranks import on_ranks

IDS = [3, 999, 0, 511, 512, 513, 1000, 255, 256, 7]


def weights_of(config):
    """Nothing is 0 or 1: biases and norms, too, must be where they belong."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in expected_tensors(config).items()}


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("name", "bias", "tied", "vocab"), [
    ("tiny-llama", False, False, 1024), ("tiny-llama", True, False, 1024), ("tiny-llama", True, True, 1023),
    ("tiny-qwen3", False, True, 1021), ("tiny-qwen3", False, False, 1001), ("tiny-qwen2", False, True, 1024),
])  # fmt: skip
def test_logits_are_those_of_one_rank(name, bias, tied, vocab, size):
    config = dataclasses.replace(NAMED_CONFIGS[name], attention_bias=bias, mlp_bias=bias, tie_word_embeddings=tied,
                                 vocab_size=vocab, intermediate_size=252, num_hidden_layers=2)  # fmt: skip
    weights, ids = weights_of(config), torch.tensor(IDS)
    whole = Decoder(config, 64)
    whole.load_weights(weights.items())
    wanted = full_forward(whole, IDS)

    def logits(group):
        split = Split(config, group.rank, size)
        decoder = ParallelDecoder(split, 64, group)
        parts = ((name, split.shard(name, tensor)) for name, tensor in weights.items())
        decoder.load_weights((name, part) for name, part in parts if part is not None)
        assert decoder.tied == tied
        hidden = decoder(ids, torch.arange(len(ids)), dense_attention, [None] * 2, None)
        assert len(decoder.logits(hidden[:0])) == 0  # a step that samples nothing
        return decoder.logits(hidden)

    found, *others = on_ranks(size, logits)
    assert found.shape == wanted.shape and found.is_contiguous()
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    assert all(len(other) == 0 for other in others)


def test_the_number_of_blocks_is_the_smallest_over_the_ranks():
    def blocks(group):
        room = (4e-3, 3e-3, 5e-3, 6e-3)[group.rank]
        config = EngineConfig(device="cpu", vocab_size=1024, max_model_len=128, kv_cache_gib=room)
        files = ModelFiles(None, NAMED_CONFIGS["tiny-llama"], "dummy")
        with pytest.raises(ValueError, match="this rank's part"):
            ModelRunner(config, model=files, group=group)
        runner = ModelRunner(config, model=load_part(files, config, group), group=group)
        return runner.num_blocks, runner.kv_cache.shape[2]

    block_bytes = 2 * 4 * 1 * 32 * 4 * 16  # K and V, layers, one KV head a rank, its size, fp32, tokens
    assert on_ranks(4, blocks) == [(int(3e-3 * 2**30) // block_bytes,) * 2] * 4


def test_gather_keeps_the_ranks_order():
    def gather(group):
        return group.gather(torch.full((2, 3), float(group.rank)))

    whole, *others = on_ranks(4, gather)
    assert whole[:, 0, 0].tolist() == [0, 1, 2, 3] and others == [None] * 3


def test_minimum_broadcast_and_gathered_numbers():
    def talk(group):
        x = torch.full((3,), 10 + group.rank)
        numbers = group.gather_numbers([group.rank, 5 * group.rank])
        return group.all_reduce_min(7 - group.rank), group.broadcast(x).tolist(), numbers

    first, *others = on_ranks(3, talk)
    assert first == (5, [10] * 3, [[0, 0], [1, 5], [2, 10]])
    assert others == [(5, [10] * 3, None)] * 2


@pytest.mark.parametrize("length", [0, 1, 2**15 - 40, 2**15 - 8, 2**15, 2**15 + 1, 10**7])
def test_messages_of_any_length(length):
    sent = bytes(itertools.islice(itertools.cycle(range(256)), length))

    def talk(group):
        for _ in range(2):
            found = group.send(sent) if group.rank == 0 else group.receive()
        return found

    _, *found = on_ranks(3, talk)
    assert found == [sent] * 2
