"""A client whose streams survive their gateway, as docs/reference/http.md describes; it records the outcome."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

PAUSE_S = 0.3  # before the client asks again for a broken stream
FINAL = (400, 401, 404, 409, 413)  # statuses that the same request would get again


class Refused(Exception):
    """An error instead of the stream, or in it. Final: the same request would get it again."""

    def __init__(self, said: str, *, is_final: bool) -> None:
        super().__init__(said)
        self.is_final = is_final


class ResumableStream:
    """One request, at one gateway after another."""

    def __init__(self, http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        self.num_resumed = 0
        self._http = http
        self._url = url
        self._body = body | {"stream": True, "stream_options": {"resumable": True}}
        self._event_id: str | None = None  # of the newest event

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield each event once.

        Raises `httpx.HTTPError` or `Refused` if the stream fails before its first event, and `Refused` if the error is
        final.
        """
        while True:
            try:
                async for event in self._from_one_gateway():
                    yield event
                return
            except (httpx.HTTPError, Refused) as error:
                if self._event_id is None or (isinstance(error, Refused) and error.is_final):
                    raise
            self.num_resumed += 1
            await asyncio.sleep(PAUSE_S)

    async def _from_one_gateway(self) -> AsyncGenerator[dict[str, Any], None]:
        headers = {} if self._event_id is None else {"last-event-id": self._event_id}
        async with self._http.stream("POST", self._url, json=self._body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode()
                raise Refused(f"{response.status_code} {said}", is_final=response.status_code in FINAL)
            event_id = self._event_id
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line == "data: [DONE]":
                    return
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Refused(line, is_final=True)
                    self._event_id = event_id
                    yield event
        raise httpx.RemoteProtocolError("the stream ended without its last event")
