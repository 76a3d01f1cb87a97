"""The parts of an engine; if one cannot be made, nothing stays behind. Needs no torch."""

from __future__ import annotations

from typing import Any

from nanoengine.config import EngineConfig
from nanoengine.engine.interfaces import BlockManagerLike, Runner, SchedulerLike
from nanoengine.engine.scheduler import choose_parts


def make_parts(
    config: EngineConfig, runner, block_manager, scheduler, more: dict[str, Any]
) -> tuple[Runner, BlockManagerLike, SchedulerLike]:
    """(runner, block manager, scheduler). more: goes to model_runner, if runner is None.

    Whoever made a runner closes it: one that was made here is closed if a later part raises
    whatever it may (weights, KV pool, processes of other ranks); one of yours stays as it is.
    Errors: TypeError for ``more`` beside a runner; what the parts raise.
    """
    if runner is not None:
        if more:
            raise TypeError(f"{', '.join(more)}: a runner of your own brings its own parts")
        return runner, *choose_parts(config, runner, block_manager, scheduler)
    from nanoengine.engine.model_runner import make_runner  # the first line that needs torch

    made = make_runner(config, **more)
    try:
        return made, *choose_parts(config, made, block_manager, scheduler)
    except BaseException:
        made.close()
        raise
