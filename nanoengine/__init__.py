"""nanoengine: a small, real LLM inference engine and the course that builds it.

``LLM`` and everything else that needs torch is resolved lazily, so that the control plane
(scheduler, block manager, simulator, traces, pictures) imports where torch is not installed.
"""

from __future__ import annotations

import importlib
import os

__version__ = "0.1.0"

# torch's CPU threads (GNU OpenMP) wait for one another by spinning, by default so long that, once another program
# takes the core of one of them, a pass of 30 ms takes seconds. With 10,000 turns they soon sleep instead. Measured on
# 2 cores beside one busy program: 20 to 30 tokens/s, before that none in a minute; alone 0 to 5 % slower.
# It is read when torch is first imported; what you have set yourself stays.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"

_HOMES = {
    "LLM": "nanoengine.llm",
    "SamplingParams": "nanoengine.sampling_params",
    "EngineConfig": "nanoengine.config",
    "LLMEngine": "nanoengine.engine.llm_engine",
    "CompletionOutput": "nanoengine.outputs",
    "RequestOutput": "nanoengine.outputs",
    "Trace": "nanoengine.trace",
    "record": "nanoengine.trace",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'nanoengine' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
