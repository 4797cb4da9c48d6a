"""Answers to HTTP/1.0, which knows no chunks: a body whose length nobody knows yet ends where its connection does.

uvicorn sends such bodies in chunks whoever asks, against RFC 9112 (6.1): who asked in HTTP/1.0 takes their lengths for
text. Old health checks ask so, `ab`, and nginx where it is not told otherwise.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def answer_without_chunks(cycle: RequestResponseCycle) -> None:
    """Says so of an exchange whose request is older than HTTP/1.1, before the application is called."""
    send, is_counted = cycle.send, False
    cycle.keep_alive = False
    cycle.waiting_for_100_continue = False  # nobody waits for what HTTP/1.0 does not know (RFC 9110, 10.1.1)

    async def send_plain(message: Any) -> None:
        nonlocal is_counted
        if message["type"] == "http.response.start":
            is_counted = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if is_counted else False
        elif not is_counted:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts down to none for each piece
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]
