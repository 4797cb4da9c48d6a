"""Addresses of engines and gateways: IPv6, and foreign peers that connect to one. No Ray."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from baton.cluster.cli.local_application import LocalApplication
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.spec import load_spec
from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import split_endpoint

from ...helpers.fakes import CountingEngine, ListedSource, make_request, serve_engine
from ...helpers.foreign_peers import GARBAGE, say
from ...helpers.ipv6 import needs_ipv6

KEY = ClusterKey.generate()
MODEL = Path(__file__).parents[3] / "configs/demo/model"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
async def test_an_engine_serves_its_gateway_whoever_else_comes_to_its_port(host: str) -> None:
    server, record = serve_engine(CountingEngine(), KEY, host=host)
    where = split_endpoint(record.address.removeprefix("tcp://"))
    source = ListedSource()
    client = ZmqEngineClient(source, KEY, "gateway-a")
    with ExitStack() as foreign_peers:
        foreign_peers.callback(server.close)
        assert where[0] == host
        for what in GARBAGE.values():
            foreign_peers.enter_context(say(where, what))
        source.show(record)
        await client.start()
        while not client.engines():
            await asyncio.sleep(0.005)
        outputs = client.submit(record, make_request("r", max_tokens=3))
        assert [token async for output in outputs for token in output.token_ids] == [1, 2, 3]
    await client.close()


@pytest.mark.timeout(60)
def test_an_engine_that_cannot_listen_at_its_address_leaves_no_socket_behind() -> None:
    with pytest.raises(zmq.ZMQError, match="Cannot assign requested address"):
        serve_engine(CountingEngine(), KEY, host="192.0.2.7")
    gc.collect()  # would hang if it had left a socket open


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("fd00::7", "http://[fd00::7]:8123"),
        ("::", "http://[::1]:8123"),
        ("0.0.0.0", "http://127.0.0.1:8123"),
        ("10.0.0.7", "http://10.0.0.7:8123"),
    ],
)
def test_the_command_asks_its_gateway_at_its_address(host: str, url: str) -> None:
    spec = load_spec({"model": str(MODEL), "gateway": {"host": host, "port": 8123}, "fleets": {"unified": {}}})
    application = LocalApplication(spec, name="app", stop=threading.Event(), on_ray_end=lambda: None)
    assert application.url == url
