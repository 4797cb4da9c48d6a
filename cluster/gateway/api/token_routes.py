"""`/tokenize` and `/detokenize`: a text or messages to token ids, and back."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ..bodies.body import read_body
from ..bodies.reading import Bodies
from .reader import Kind


class TokenEndpoint:
    """An ASGI app: it writes a long answer in pieces, none before its client has taken the one before."""

    def __init__(self, bodies: Bodies, max_body_bytes: int, kind: Kind) -> None:
        self._bodies, self._max_body_bytes, self._kind = bodies, max_body_bytes, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.budget.reservation() as held:
            with await read_body(Request(scope, receive), self._max_body_bytes, held) as body:
                answer = await self._bodies.answer(self._kind, body, held)
            with answer:
                length = str(answer.size).encode()
                headers = [(b"content-type", b"application/json"), (b"content-length", length)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                for piece in answer.pieces():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
