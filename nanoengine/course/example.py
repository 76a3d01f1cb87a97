"""The running example: four requests A-D, block size 4, 12 blocks. Lessons 01 and 04-09 use the same.

    A   10 prompt tokens, 12 new     starts with the same 8 tokens as C (a system prompt)
    B    6 prompt tokens, 12 new
    C   14 prompt tokens,  6 new     finds two of A's blocks in the prefix cache
    D   20 prompt tokens,  6 new     long: computed in chunks, and the one that must give way

Together they need more than 12 blocks, so that somebody is preempted.
"""

from __future__ import annotations

from nanoengine.config import EngineConfig
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sampling_params import SamplingParams
from nanoengine.sim import SlotRunner

BLOCK_SIZE, NUM_BLOCKS, TOKEN_BUDGET = 4, 12, 16
SYSTEM_PROMPT = list(range(100, 108))
# letter -> (prompt token ids, number of new tokens)
REQUESTS: dict[str, tuple[list[int], int]] = {
    "A": (SYSTEM_PROMPT + [1, 2], 12),
    "B": (list(range(30, 36)), 12),
    "C": (SYSTEM_PROMPT + [9] * 6, 6),
    "D": (list(range(60, 80)), 6),
}


def example_engine(policy: str = "token_budget", *, engine_class=LLMEngine, **settings) -> LLMEngine:
    """An engine on SlotRunner with A-D queued, ids 0-3. settings: fields of EngineConfig."""
    settings = {"max_num_batched_tokens": TOKEN_BUDGET, "max_num_seqs": 4} | settings
    blocks, size = settings.pop("num_blocks", NUM_BLOCKS), settings.pop("block_size", BLOCK_SIZE)
    engine = engine_class(EngineConfig(policy=policy, **settings), runner=SlotRunner(blocks, size))
    for prompt, new_tokens in REQUESTS.values():
        engine.add_request(prompt, SamplingParams(max_tokens=new_tokens))
    return engine
