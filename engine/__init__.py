"""The inference engine: one model on one group of devices.

`from baton.engine import LLM, SamplingParams` is all that a script needs. Names load on first use, so that routers and
tools that need only the bookkeeping (`baton.engine.core`) never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig as EngineConfig
    from .config import InvalidEngineConfig as InvalidEngineConfig
    from .core.sampling import InvalidSamplingParams as InvalidSamplingParams
    from .core.sampling import SamplingParams as SamplingParams
    from .core.sampling import StructuredOutputsParams as StructuredOutputsParams
    from .offline.arguments import InvalidArgument as InvalidArgument
    from .offline.arguments import InvalidPrompt as InvalidPrompt
    from .offline.completion import CompletionOutput as CompletionOutput
    from .offline.completion import Logprob as Logprob
    from .offline.completion import RequestOutput as RequestOutput
    from .offline.llm import LLM as LLM
    from .offline.llm import GenerationFailed as GenerationFailed
    from .startup.build import Engine as Engine
    from .startup.build import build_engine as build_engine

_HOME = {
    "LLM": "offline.llm",
    "SamplingParams": "core.sampling",
    "StructuredOutputsParams": "core.sampling",
    "InvalidSamplingParams": "core.sampling",
    "RequestOutput": "offline.completion",
    "CompletionOutput": "offline.completion",
    "Logprob": "offline.completion",
    "GenerationFailed": "offline.llm",
    "InvalidArgument": "offline.arguments",
    "InvalidPrompt": "offline.arguments",
    "EngineConfig": "config",
    "InvalidEngineConfig": "config",
    "Engine": "startup.build",
    "build_engine": "startup.build",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
