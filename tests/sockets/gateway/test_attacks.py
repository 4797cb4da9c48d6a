"""Expensive bodies of one client neither delay other clients nor exceed the memory limit of a gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from .attack_bodies import CHAT, MIB, attacks
from .attacked_gateway import AttackedGateway, attacked_gateway

SILENT_S = 4.0  # far more than on a busy machine; these bodies once blocked the event loop for more than twice as long
LARGEST_ANSWER_BYTES = 20 * MIB  # an answer with the largest number of log probabilities
NAMES = list(attacks(1024))

Attacks = dict[str, tuple[str, bytes]]


@pytest.fixture(scope="module")
def bodies() -> Attacks:
    """The bodies, 200 MB in all: a fixture, so that processes that only collect tests do not hold them."""
    return attacks()


@pytest.fixture(scope="module")
def gateway() -> Iterator[AttackedGateway]:
    with attacked_gateway() as started:
        yield started


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
async def test_a_gateway_answers_other_clients_during_an_attack(
    gateway: AttackedGateway, bodies: Attacks, name: str
) -> None:
    route, body = bodies[name]
    longest_s = 0.0
    json_type = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
        attack = asyncio.create_task(http.post(route, content=body, headers=json_type))
        while not attack.done():
            began_s = time.monotonic()
            assert (await http.get("/live")).status_code == 200
            longest_s = max(longest_s, time.monotonic() - began_s)
            await asyncio.sleep(0.02)
        response = await attack
    assert response.status_code in (200, 400, 404), response.text
    assert len(response.content) < LARGEST_ANSWER_BYTES
    assert longest_s < SILENT_S


@pytest.mark.slow
def test_unfinished_uploads_stay_within_the_memory_limit() -> None:
    """40 uploads of 15 MiB once took 617 MB. Small requests must still be served."""
    with attacked_gateway(request_memory_bytes=128 * MIB) as gateway:
        before = sum(gateway.memory_mib("VmHWM").values())
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        part = head % (CHAT.encode(), 15 * MIB) + b'{"user":"' + b"x" * (14 * MIB)
        uploads = []
        for _ in range(40):
            uploads.append(socket.create_connection(("127.0.0.1", gateway.port), timeout=60))
            with contextlib.suppress(OSError):  # the gateway has refused it and closed the connection
                uploads[-1].sendall(part)
        _wait_for_refusals(uploads, 38)  # two of them fit into the 32 MiB for large bodies
        assert gateway.files_mib() <= 32
        with httpx.Client(base_url=gateway.url, timeout=30) as http:
            answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 1})
            assert answer.status_code == 200
        after = sum(gateway.memory_mib("VmHWM").values())
        for upload in uploads:
            upload.close()
        assert after - before < 60


def _wait_for_refusals(uploads: list[socket.socket], count: int) -> None:
    """Wait for so many answers, and check that each is a 503 with a `Retry-After`."""
    waiting = list(uploads)
    while len(uploads) - len(waiting) < count:
        answered, _, _ = select.select(waiting, [], [], 60)
        assert answered, f"only {len(uploads) - len(waiting)} uploads were refused"
        for upload in answered:
            answer = upload.recv(4096)
            assert answer.startswith(b"HTTP/1.1 503"), answer
            assert b"retry-after: " in answer
            waiting.remove(upload)


@pytest.mark.slow
async def test_large_template_variables_leave_nothing_behind(bodies: Attacks) -> None:
    """Four bodies of 16 MiB at once took 3 GB, and left 0.5 GB or more."""
    route, body = bodies["template variables"]
    with attacked_gateway() as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
            assert (
                await http.post("/tokenize", json={"prompt": "fox " * 20_000})
            ).status_code == 200  # the body readers have started
            before = gateway.memory_mib("VmRSS")
            headers = {"content-type": "application/json"}
            answers = await asyncio.gather(*[http.post(route, content=body, headers=headers) for _ in range(4)])
        assert {answer.status_code for answer in answers} == {400}
        assert sum(gateway.memory_mib("VmHWM").values()) - sum(before.values()) < 500
        after = gateway.memory_mib("VmRSS")
        assert after[gateway.process.pid] - before[gateway.process.pid] < 50
        assert sum(after.values()) - sum(before.values()) < 150


@pytest.mark.slow
async def test_answers_with_many_log_probabilities_stay_within_the_memory_limit() -> None:
    """Each answer has a million values, so about 100 MB would be held until it is complete."""
    body = {"model": "tiny", "prompt": "hello", "n": 64, "max_tokens": 800, "logprobs": 20, "ignore_eos": True}
    with attacked_gateway(request_memory_bytes=64 * MIB) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
            assert (await http.post("/v1/completions", json={**body, "n": 2, "max_tokens": 20})).status_code == 200
            before = sum(gateway.memory_mib("VmRSS").values())
            answers = await asyncio.gather(*[http.post("/v1/completions", json=body) for _ in range(3)])
        assert {answer.status_code for answer in answers} <= {400, 503}, [answer.text[:200] for answer in answers]
        assert sum(gateway.memory_mib("VmHWM").values()) - before < 60
