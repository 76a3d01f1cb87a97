"""How an engine stands, as plain numbers that any thread may read."""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.engine.llm_engine import LLMEngine


@dataclass(slots=True, frozen=True)
class Stats:
    """running, waiting: requests. num_blocks, free_blocks: of the KV pool (cached free blocks are free).

    queried_tokens, hit_tokens: prompt tokens looked up in the prefix cache at first admission, and found.
    preemptions, steps, failures (steps that raised): counts since the start.
    """

    running: int
    waiting: int
    num_blocks: int
    free_blocks: int
    queried_tokens: int
    hit_tokens: int
    preemptions: int
    steps: int
    failures: int

    @property
    def kv_use(self) -> float:
        """Share of the KV pool that sequences hold, in [0, 1]."""
        return 1 - self.free_blocks / self.num_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up tokens that were found; 0 before the first look-up."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


def take_stats(engine: LLMEngine, steps: int, failures: int) -> Stats:
    """To be called by the thread that steps the engine. Parts of your own may lack counters: then they are 0."""
    scheduler, manager = engine.scheduler, engine.block_manager
    return Stats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        num_blocks=manager.num_blocks,
        free_blocks=manager.num_free_blocks,
        queried_tokens=getattr(manager, "num_queried_tokens", 0),
        hit_tokens=getattr(manager, "num_hit_tokens", 0),
        preemptions=getattr(scheduler, "num_preemptions", 0),
        steps=steps,
        failures=failures,
    )
