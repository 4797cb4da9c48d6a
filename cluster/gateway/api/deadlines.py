"""Deadlines of a request: for its whole response, and for the first token.

The operator's settings are upper limits; a client may ask for less with headers:

    request-timeout-ms: 20000           the whole response
    first-token-timeout-ms: 1500        its first token

Clients also have timeouts of their own, which the server does not know: the header that some SDKs send
(`x-stainless-read-timeout`) limits the silence within a stream, not the whole response.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from ..errors import ApiError, bad_request, not_finished, timed_out
from ..settings import GatewaySettings

WHOLE_HEADER = "request-timeout-ms"
FIRST_TOKEN_HEADER = "first-token-timeout-ms"
MOST_MS = 10**9 - 1


class RequestDeadlines:
    """Deadlines of one request, counted from construction. Raises `ApiError` (400) for a malformed header."""

    def __init__(self, settings: GatewaySettings, headers: Mapping[str, str]) -> None:
        asked_s = _seconds(headers, WHOLE_HEADER)
        first_token_s = settings.first_token_timeout_s or math.inf
        self._whole_s = min(settings.request_timeout_s, asked_s)
        self._first_token_s = min(first_token_s, _seconds(headers, FIRST_TOKEN_HEADER))
        self._began_s = asyncio.get_running_loop().time()
        self._timeout: asyncio.Timeout | None = None
        self._has_token = False
        self._error: ApiError | None = None  # error that ended the request before its deadline
        self.is_clients = asked_s < settings.request_timeout_s  # then a timeout is no sign of slow engines

    @property
    def deadline_s(self) -> float:
        """The deadline of the whole response, by the event loop's clock."""
        return self._began_s + self._whole_s

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel the enclosed work at the deadline, and raise `ApiError` (408)."""
        try:
            async with asyncio.timeout_at(self._began_s + min(self._whole_s, self._first_token_s)) as self._timeout:
                yield
        except TimeoutError:
            raise self._error or self._over() from None

    def end(self, error: ApiError) -> None:
        """End the request with an error at once, as if its deadline had passed."""
        if self._timeout is not None and not self._timeout.expired():
            self._error = error
            self._timeout.reschedule(self._began_s)

    def first_token(self) -> None:
        """Note the first token, which removes its deadline. Later calls have no effect."""
        is_over = self._timeout is None or self._timeout.expired() or self._error is not None
        if not self._has_token and not is_over and self._timeout is not None:
            self._has_token = True
            self._timeout.reschedule(self.deadline_s)

    def _over(self) -> ApiError:
        if self._has_token or self._whole_s <= self._first_token_s:
            return not_finished(self._whole_s)
        message = f"The first token did not arrive within {self._first_token_s:g} s, so the request was aborted."
        return timed_out(message, "first_token_timeout")


def _seconds(headers: Mapping[str, str], name: str) -> float:
    """Return a header's time in seconds; infinity if the client did not send it."""
    given = headers.get(name)
    if given is None:
        return math.inf
    text = given.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_MS)) and int(text) > 0):
        message = f"{name!r} must be a whole number of milliseconds from 1 to {MOST_MS}, not {text[:32]!r}."
        raise bad_request(name, message)
    return int(text) / 1000
