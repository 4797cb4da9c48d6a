"""Responses that end before they are complete."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from baton.cluster.gateway.api.detokenize import ChoiceDelta
from baton.cluster.gateway.api.renderer import Renderer
from baton.cluster.gateway.api.response_writer import ResponseWriter, WritingTurns
from baton.cluster.gateway.bodies.budget import MemoryBudget
from baton.cluster.gateway.errors import ApiError, draining


class Connection:
    """A connection whose first body message fails."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._is_whole = True

    async def send(self, message: Any) -> None:
        if message["type"] != "http.response.body":
            return
        if self._is_whole:
            self._is_whole = False
            raise InterruptedError
        self.bodies.append(message["body"])


class ContentPart:
    needs_each_delta = False

    def event(self, index: int, delta: ChoiceDelta) -> bytes:
        raise AssertionError("there are no deltas to render")

    def whole(self, choices: list[list[ChoiceDelta]]) -> bytes:
        return b"an answer"

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def failed(self, error: Exception) -> bytes:
        return b"data: an error\n\n"


async def nothing() -> AsyncGenerator[list[tuple[int, ChoiceDelta]], None]:
    for step in ():
        yield step


@pytest.mark.parametrize(("streams", "bodies"), [(True, [b"data: an error\n\n"]), (False, [])])
async def test_only_a_stream_that_breaks_off_ends_with_an_event(streams: bool, bodies: list[bytes]) -> None:
    """A whole answer has a Content-Length, so its client can see that it ends early."""
    connection, words = Connection(), cast(Renderer, ContentPart())
    answer = ResponseWriter(connection.send, WritingTurns(), ApiError.body)
    held = MemoryBudget(2**30).reservation()
    with pytest.raises(InterruptedError):
        await (answer.write_events(words, nothing(), None) if streams else answer.write_whole(words, nothing(), held))
    await answer.fail(draining())
    assert connection.bodies == bodies
