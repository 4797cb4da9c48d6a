"""Messages that one end cannot decode, as between different versions: the request is retried without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest

from baton.cluster.contracts import Role
from baton.cluster.wire import Codec, Outputs, Submit

from .zmq_fleet import WiredFleet

pytestmark = pytest.mark.timeout(60)

BODY = {"model": "tiny", "prompt": list(range(20, 100)), "max_tokens": 9, "ignore_eos": True, "seed": 7}
AT_ONCE_S = 10.0  # long before the request's own time is over


def of_another_type(frame: bytes) -> bytes:
    fields = msgspec.msgpack.decode(frame)
    fields["request"]["seed"] = "text"
    return msgspec.msgpack.encode(fields)


def noise(frame: bytes) -> bytes:
    return b"\xc1" + frame


def spoil(
    patch: pytest.MonkeyPatch, name: str, is_meant: Callable[[Any], bool], change: Callable[[bytes], bytes]
) -> list[bytes]:
    """Corrupt the first matching message that any process decodes. Returns a list that will hold this message."""
    decode, spoilt = getattr(Codec, name), []

    def decode_spoilt(codec: Codec, frame: bytes) -> object:
        message = decode(codec, frame)
        if spoilt or not is_meant(message):
            return message
        spoilt.append(frame)
        return decode(codec, change(frame))

    patch.setattr(Codec, name, decode_spoilt)
    return spoilt


def is_submit(message: Any) -> bool:
    return isinstance(message, Submit)


def brings_tokens(message: Any) -> bool:
    return isinstance(message, Outputs) and any(output.token_ids for output in message.outputs)


@pytest.mark.parametrize(
    ("name", "is_meant", "change", "reason"),
    [
        ("decode_from_client", is_submit, of_another_type, "engine-failed"),
        ("decode_from_client", is_submit, noise, "engine-gone"),
        ("decode_from_engine", brings_tokens, noise, "engine-gone"),
    ],
    ids=["a request that can be named", "a request that cannot", "an answer"],
)
async def test_the_request_is_retried_on_another_engine_at_once(
    name: str, is_meant: Callable[[Any], bool], change: Callable[[bytes], bytes], reason: str, monkeypatch: Any
) -> None:
    with closing(WiredFleet(Role.UNIFIED, Role.UNIFIED)) as fleet:
        async with fleet.gateway("one") as gateway:
            undisturbed = await gateway.http.post("/v1/completions", json=BODY)
            spoilt = spoil(monkeypatch, name, is_meant, change)
            response = await asyncio.wait_for(gateway.http.post("/v1/completions", json=BODY), AT_ONCE_S)
            assert len(spoilt) == 1
            assert response.headers["x-baton-path"] == f"recomputed; reason={reason}; rung=unified"
            assert response.json()["choices"] == undisturbed.json()["choices"]
