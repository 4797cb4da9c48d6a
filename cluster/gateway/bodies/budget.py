"""Memory budget of one gateway's requests: bodies while they are read, prompts while they are served, and answers that
are sent only when complete.

    a body arrives ──hold_body──> it is read ──hold_prompts──> tokens come ──add_answer──> the answer ends ──release──>

All requests together may hold `limit_bytes`, large bodies and answers a quarter of it, so that clients with large
requests leave memory for all others.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from ..errors import answer_too_large, memory_full

SMALL_BYTES = 64 << 10  # a larger body counts as large
SMALL_ANSWER_BYTES = 1 << 20
LARGE_SHARE = 4  # large bodies and answers may hold 1 / LARGE_SHARE of the budget
TOKEN_ID_BYTES = 40  # a Python integer, and a pointer to it
RETRY_S = 1.0  # large bodies are read in well under a second each


class MemoryBudget:
    """Counts the bytes that all requests hold."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.large_bytes = 0  # of large bodies and answers

    @property
    def limit_of_large_bytes(self) -> int:
        return self.limit_bytes // LARGE_SHARE

    def reservation(self) -> Reservation:
        """Return an empty reservation for one request."""
        return Reservation(self)


class Reservation:
    """The bytes that one request holds. As a context manager, it releases them at the end."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._held_bytes = 0
        self._large_bytes = 0
        self._answer_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Release all bytes."""
        self._set(0, 0)

    @property
    def largest_body_bytes(self) -> int:
        """Return the size of the largest body for which there would be memory if no other request held any."""
        return max(self._budget.limit_of_large_bytes, min(SMALL_BYTES, self._budget.limit_bytes))

    def hold_body(self, num_bytes: int) -> None:
        """Hold the bytes of the body that have arrived so far. Raises `ApiError` (503) if the budget is exhausted."""
        self._hold(num_bytes, num_bytes if num_bytes > SMALL_BYTES else 0)

    def hold_prompts(self, num_tokens: int) -> None:
        """Hold the prompts instead of the body. Raises `ApiError` (503) if the budget is exhausted."""
        self._hold(num_tokens * TOKEN_ID_BYTES, 0)

    def hold_answer(self, num_bytes: int) -> None:
        """Hold an answer instead of the body. Raises `ApiError` (503) if the budget is exhausted."""
        self._hold(num_bytes, 0)

    def add_answer(self, num_bytes: int) -> None:
        """Hold more bytes of an answer that is sent only when complete, in addition to the prompts.

        Raises `ApiError`: 400 if this answer alone exceeds the share of large ones, 503 if the budget is exhausted.
        """
        self._answer_bytes += num_bytes
        if self._answer_bytes > self._budget.limit_of_large_bytes:
            raise answer_too_large(self._budget.limit_of_large_bytes)
        is_large = self._answer_bytes > SMALL_ANSWER_BYTES
        self._hold(self._held_bytes + num_bytes, self._answer_bytes if is_large else 0)

    def _hold(self, held_bytes: int, large_bytes: int) -> None:
        budget = self._budget
        grows = held_bytes > self._held_bytes
        held = budget.held_bytes - self._held_bytes + held_bytes
        large = budget.large_bytes - self._large_bytes + large_bytes
        if grows and (held > budget.limit_bytes or (large_bytes and large > budget.limit_of_large_bytes)):
            raise memory_full(budget.limit_bytes, RETRY_S)
        self._set(held_bytes, large_bytes)

    def _set(self, held_bytes: int, large_bytes: int) -> None:
        self._budget.held_bytes += held_bytes - self._held_bytes
        self._budget.large_bytes += large_bytes - self._large_bytes
        self._held_bytes, self._large_bytes = held_bytes, large_bytes
