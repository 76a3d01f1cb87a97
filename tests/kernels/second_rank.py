"""Two ranks of the GPU's runner on a CPU, kernels in Triton's interpreter: rank 1 is ``python -m`` this module."""

import dataclasses
import os
import sys

import torch
from torch.distributed import TCPStore

from nanoengine.config import EngineConfig
from nanoengine.loader.resolve import ModelFiles
from nanoengine.model.config import ModelConfig
from nanoengine.parallel.group import Group

SHAPE = ModelConfig("Qwen3ForCausalLM", 63, 32, 48, 1, 4, 2, 16, 64, qk_norm=True, dtype="float32",
                    tie_word_embeddings=True)  # fmt: skip
CONFIG = EngineConfig(vocab_size=63, max_model_len=40, max_num_seqs=2, max_num_batched_tokens=8, num_blocks=8,
                      device="cpu", tensor_parallel_size=2)  # fmt: skip
FILES = ModelFiles(None, SHAPE, "dummy")
ONE = dataclasses.replace(CONFIG, tensor_parallel_size=1)


def make(kind, group, **parts):
    """The runner of one rank, and what its graphs replay; they are not recorded, but run each time."""
    from nanoengine.attention.triton_attention import TritonAttention
    from nanoengine.parallel.decoder import load_part
    from nanoengine.parallel.leader import Leader
    from tests.kernels.unrecorded import give_graphs

    config, more = (CONFIG, dict(group=group)) if group else (ONE, {})
    # a leader loads its part itself
    model = load_part(FILES, config, group) if group and not issubclass(kind, Leader) else FILES
    runner = kind(config, model=model, attention=TritonAttention(2), **more, **parts)
    for parameter in runner.model.parameters():
        parameter.data *= 10  # logits that differ
    return runner, give_graphs(runner, CONFIG)


def main(port: int) -> None:
    from nanoengine.parallel.leader import facts
    from nanoengine.parallel.steps import StepReceiver
    from nanoengine.worker.gpu_runner import GpuRunner

    store = TCPStore("127.0.0.1", port, is_master=False)
    print("hello", flush=True)
    group = Group(store, 1, 2, torch.device("cpu"), "127.0.0.1")

    class Follower(GpuRunner):
        def __init__(self, *arguments, **parts):
            super().__init__(*arguments, **parts)
            group.gather_numbers(facts(self))

    (runner, _), steps = make(Follower, group), StepReceiver()
    while (message := group.receive()) is not None:
        runner.run(steps.unpack(message))


if __name__ == "__main__":
    main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # as parallel.worker does: a thread of gloo that still runs would abort Python's own end
