"""Which runner an engine gets: for a CPU or a GPU, alone or as the first of several ranks."""

from __future__ import annotations

from nanoengine.config import EngineConfig
from nanoengine.worker.model_runner import ModelRunner, runner_type


def make_runner(config: EngineConfig, **parts) -> ModelRunner:
    """The runner for the config's device; for several ranks the first one's, which leads the others.

    parts: model, load_format, sampler, attention of ModelRunner.
    """
    if config.tensor_parallel_size > 1:
        from nanoengine.parallel.launch import make_leader

        return make_leader(config, **parts)
    return runner_type(config.device)(config, **parts)
