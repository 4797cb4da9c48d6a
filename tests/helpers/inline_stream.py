"""A CUDA stream's stand-in without a GPU: each call does its work before it returns.

Implements `backends.cuda_stream.Stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from baton.engine.worker.outputs import Event


class InlineStream:
    """A stream whose captured steps are plain functions."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self) -> Event:
        return _PassedEvent()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        pass


class _PassedEvent:
    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass
