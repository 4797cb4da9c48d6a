"""Memory budget of one gateway's requests: bodies while they are read, and prompts while they are served.

    a body arrives ──hold_body──> it is read ──hold_prompts──> the answer ends ──release──>

All requests together have `limit_bytes`, and bodies above `SMALL_BYTES` a quarter of it, so that clients that send
large ones leave memory for all others.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from ..errors import memory_full

SMALL_BYTES = 64 << 10
LARGE_SHARE = 4  # large bodies may hold 1 / LARGE_SHARE of the budget
TOKEN_BYTES = 40  # of a prompt: a Python integer, and a pointer to it
RETRY_S = 1.0  # large bodies are read in well under a second each


class MemoryBudget:
    """Counts the bytes that all requests hold."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.large_bytes = 0  # of bodies above `SMALL_BYTES`

    def reservation(self) -> Reservation:
        """Return an empty reservation for one request."""
        return Reservation(self)


class Reservation:
    """The bytes that one request holds. A context manager, which releases them at its end."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._held_bytes = 0
        self._large_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Release all bytes."""
        self._set(0, 0)

    def hold_body(self, num_bytes: int) -> None:
        """Hold the bytes of the body that have arrived. Raises `ApiError` (503) if the budget is exhausted."""
        self._hold(num_bytes, num_bytes if num_bytes > SMALL_BYTES else 0)

    def hold_prompts(self, num_tokens: int) -> None:
        """Hold prompts in place of the body. Raises `ApiError` (503) if the budget is exhausted."""
        self._hold(num_tokens * TOKEN_BYTES, 0)

    def hold_answer(self, num_bytes: int) -> None:
        """Hold an answer in place of the body. Raises `ApiError` (503) if the budget is exhausted."""
        self._hold(num_bytes, 0)

    def _hold(self, held_bytes: int, large_bytes: int) -> None:
        budget = self._budget
        grows = held_bytes > self._held_bytes
        held = budget.held_bytes - self._held_bytes + held_bytes
        large = budget.large_bytes - self._large_bytes + large_bytes
        if grows and (held > budget.limit_bytes or (large_bytes and large > budget.limit_bytes // LARGE_SHARE)):
            raise memory_full(budget.limit_bytes, RETRY_S)
        self._set(held_bytes, large_bytes)

    def _set(self, held_bytes: int, large_bytes: int) -> None:
        self._budget.held_bytes += held_bytes - self._held_bytes
        self._budget.large_bytes += large_bytes - self._large_bytes
        self._held_bytes, self._large_bytes = held_bytes, large_bytes
