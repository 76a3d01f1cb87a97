"""Which block manager and scheduler an engine gets."""

from __future__ import annotations

from dataclasses import replace

from nanoengine.config import EngineConfig
from nanoengine.engine.block_manager import BlockManager
from nanoengine.engine.protocols import Runner, require
from nanoengine.engine.scheduler import POLICIES


def choose_parts(config: EngineConfig, runner, block_manager=None, scheduler=None):
    """The block manager and the scheduler of an engine: yours, or those that the config names.

    Each may be an object or a class; a class is called as ``(num_blocks, block_size)`` with the
    runner's sizes, or as ``(config, block_manager)``, with a cap on mixed prefills that the config
    leaves to the runner filled in. A scheduler object brings its own block manager.
    Errors: ValueError if the parts do not fit together.
    """
    require(runner, Runner, "runner")
    if block_manager is None and scheduler is not None and not isinstance(scheduler, type):
        block_manager = scheduler.block_manager
    if block_manager is None:
        block_manager = BlockManager(
            runner.num_blocks, runner.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
    elif isinstance(block_manager, type):
        block_manager = block_manager(runner.num_blocks, runner.block_size)
    if (
        block_manager.block_size != runner.block_size
        or block_manager.num_blocks > runner.num_blocks
    ):
        raise ValueError(
            f"block_manager has {block_manager.num_blocks} blocks of {block_manager.block_size} tokens, "
            f"the runner's KV pool {runner.num_blocks} of {runner.block_size}: make it from the runner's sizes"
        )
    if scheduler is None:
        scheduler = POLICIES[config.policy]
    if isinstance(scheduler, type):
        if config.max_mixed_prefill_tokens is None:
            liked = runner.max_mixed_prefill_tokens
            config = replace(config, max_mixed_prefill_tokens=liked)
        scheduler = scheduler(config, block_manager)
    if scheduler.block_manager is not block_manager:
        raise ValueError(
            "the scheduler uses another block_manager than the engine: pass the same one to both"
        )
    return block_manager, scheduler
