"""nanoengine: a small, real LLM inference engine and the course that builds it.

``LLM`` and everything else that needs torch is resolved lazily, so that the control plane
(scheduler, block manager, simulator, traces, pictures) imports where torch is not installed.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "LLM": "nanoengine.llm",
    "SamplingParams": "nanoengine.sampling_params",
    "EngineConfig": "nanoengine.config",
    "LLMEngine": "nanoengine.engine.llm_engine",
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
