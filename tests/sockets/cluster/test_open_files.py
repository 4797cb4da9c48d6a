"""More connections than a gateway may have open files: each is answered, and the log and the metrics report it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from ...helpers.free_ports import free_port

FILES, CONNECTIONS, MAX_INFLIGHT = 256, 300, 4096

# Answers once all connections have come, so that they are open at the same time.
SERVER = f"""
import asyncio, logging, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES} // 2, {FILES}))

from baton.cluster.contracts import DirectorySnapshot
from baton.cluster.gateway.middleware import Drain
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.ingress.http_server import HttpServer, RefusalCounter, listen, raise_descriptor_limit

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
metrics = GatewayMetrics("tiny", list)
refusals, count, all_came = RefusalCounter(metrics), 0, asyncio.Event()

def came():
    global count
    count += 1
    if count == {CONNECTIONS}:
        all_came.set()

def refused(error, client):
    refusals(error, client)
    came()

async def app(scope, receive, send):
    if scope["path"] == "/metrics":
        body = metrics.render()
    else:
        came()
        await all_came.wait()
        body = b"here"
    await send({{"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]}})
    await send({{"type": "http.response.body", "body": body}})

async def main():
    server = HttpServer(
        app, Drain(), drain_s=0, drain_timeout_s=1, refused=refused, descriptors=raise_descriptor_limit({MAX_INFLIGHT})
    )
    server.start(listen("127.0.0.1", int(sys.argv[1]), share=False))
    await server.ended()

if sys.argv[2] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


async def ask(port: int, path: str) -> tuple[bytes, bytes]:
    """Send a request; return the head and body of the answer. Raises `ConnectionError` if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
    answer = await reader.read()
    writer.close()
    if not answer:
        raise ConnectionError("closed without an answer")
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_connections_beyond_the_limit_of_open_files_are_answered_with_503(loop: str) -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port), loop], stderr=subprocess.PIPE, text=True)
    try:
        await until_it_listens(process, port)
        answers = await asyncio.gather(*(ask(port, "/") for _ in range(CONNECTIONS)))
        _, metrics = await ask(port, "/metrics")
    finally:
        process.kill()
        log = process.communicate()[1]
    served = [body for head, body in answers if head.startswith(b"HTTP/1.1 200 ")]
    refused: list[dict[str, Any]] = [
        json.loads(body)["error"] for head, body in answers if head.startswith(b"HTTP/1.1 503 ")
    ]
    assert len(served) + len(refused) == CONNECTIONS
    assert len(served) > FILES // 4, "most of what may be open is for connections"
    assert {error["code"] for error in refused} == {"too_many_connections"}
    counted = f'baton_http_responses_total{{route="other",status="503"}} {float(len(refused))}'
    assert counted in metrics.decode()
    assert f"this process may have {FILES} files open" in log, "the start says so"
    assert f"max_inflight_requests is {MAX_INFLIGHT}" in log
    assert "connections refused with 503" in log


async def until_it_listens(process: subprocess.Popen[str], port: int) -> None:
    while process.poll() is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise AssertionError(process.communicate()[1])
