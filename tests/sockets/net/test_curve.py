"""CURVE: only holders of the cluster key can communicate over its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Iterator

import pytest
import zmq
import zmq.asyncio
from zmq.auth.base import Authenticator

from baton.engine.net.curve import ClusterKey, InvalidClusterKey

SILENCE_MS = 400  # long enough for a handshake on a busy machine, short enough for a test


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        context.linger = 0
        yield context


def server_of(context: zmq.Context, key: ClusterKey) -> tuple[zmq.Socket, str]:
    server = context.socket(zmq.ROUTER)
    key.secure_server(server)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    return server, f"tcp://127.0.0.1:{port}"


def dealer(context: zmq.Context, address: str) -> zmq.Socket:
    client = context.socket(zmq.DEALER)
    client.connect(address)
    return client


def test_holders_of_the_key_communicate_both_ways(context: zmq.Context) -> None:
    key = ClusterKey.generate()
    server, address = server_of(context, key)
    with server, context.socket(zmq.DEALER) as client:
        pickle.loads(pickle.dumps(key)).secure_client(client)
        client.connect(address)
        client.send(b"claim")
        assert server.poll(5000)
        route, message = server.recv_multipart()
        assert message == b"claim"
        server.send_multipart([route, b"granted"])
        assert client.poll(5000)
        assert client.recv() == b"granted"


def send_if_open(client: zmq.Socket) -> None:
    """Send, unless the server has already refused the client, which then has no peer."""
    with contextlib.suppress(zmq.Again):
        client.send(b"claim", zmq.NOBLOCK)


def test_messages_of_a_client_without_a_key_do_not_arrive(context: zmq.Context) -> None:
    server, address = server_of(context, ClusterKey.generate())
    with server, dealer(context, address) as client:
        send_if_open(client)
        assert not server.poll(SILENCE_MS)


def test_messages_of_a_client_with_another_clusters_key_do_not_arrive(context: zmq.Context) -> None:
    server, address = server_of(context, ClusterKey.generate())
    with server, context.socket(zmq.DEALER) as client:
        ClusterKey.generate().secure_client(client)
        client.connect(address)
        send_if_open(client)
        assert not server.poll(SILENCE_MS)


def client_with_public_key_only(key: ClusterKey, context: zmq.Context, address: str) -> zmq.Socket:
    """Return a client that knows the public key only."""
    client = context.socket(zmq.DEALER)
    client.curve_serverkey = zmq.curve_public(key.to_bytes())
    client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
    client.connect(address)
    return client


def test_knowing_the_public_key_is_not_enough(context: zmq.Context) -> None:
    """Without the ZAP handler libzmq would let this client in."""
    key = ClusterKey.generate()
    server, address = server_of(context, key)
    with server, client_with_public_key_only(key, context, address) as client:
        send_if_open(client)
        assert not server.poll(SILENCE_MS)


def test_without_a_zap_handler_no_client_is_accepted(context: zmq.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind_nothing(authenticator: Authenticator) -> None:
        authenticator.zap_socket = authenticator.context.socket(zmq.REP)

    monkeypatch.setattr(Authenticator, "start", bind_nothing)
    key = ClusterKey.generate()
    server, address = server_of(context, key)
    with server, client_with_public_key_only(key, context, address) as client:
        send_if_open(client)
        assert not server.poll(SILENCE_MS)


def test_a_client_sends_nothing_to_a_server_without_the_key(context: zmq.Context) -> None:
    with context.socket(zmq.ROUTER) as impostor, context.socket(zmq.DEALER) as client:
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        ClusterKey.generate().secure_client(client)
        client.connect(f"tcp://127.0.0.1:{port}")
        send_if_open(client)
        assert not impostor.poll(SILENCE_MS)


def test_two_clusters_in_one_context_are_separate(context: zmq.Context) -> None:
    one, other = ClusterKey.generate(), ClusterKey.generate()
    (server, address), (bystander, _) = server_of(context, one), server_of(context, other)
    with server, bystander, context.socket(zmq.DEALER) as client:
        client.curve_serverkey = zmq.curve_public(one.to_bytes())
        client.curve_secretkey = other.to_bytes()
        client.curve_publickey = zmq.curve_public(other.to_bytes())
        client.connect(address)
        send_if_open(client)
        assert not server.poll(SILENCE_MS)


async def test_asyncio_sockets_are_secured_alike() -> None:
    key = ClusterKey.generate()
    with zmq.asyncio.Context() as context:
        context.linger = 0
        with context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
            key.secure_server(server)
            port = server.bind_to_random_port("tcp://127.0.0.1")
            key.secure_client(client)
            client.connect(f"tcp://127.0.0.1:{port}")
            await client.send(b"submit")
            assert (await asyncio.wait_for(server.recv_multipart(), 20))[1] == b"submit"


def test_contexts_that_had_servers_end_at_once() -> None:
    for _ in range(3):
        with zmq.Context() as context:
            server, _address = server_of(context, ClusterKey.generate())
            server.close()


def test_a_context_that_is_collected_while_another_is_secured_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection may end a context in the very thread that secures another one, at any point."""
    context = zmq.Context()
    server, _address = server_of(context, ClusterKey.generate())
    server.close()
    collecting = threading.Thread(target=context.term, daemon=True)
    start = Authenticator.start

    def collect_and_start(authenticator: Authenticator) -> None:
        collecting.start()
        collecting.join(30)
        start(authenticator)

    monkeypatch.setattr(Authenticator, "start", collect_and_start)
    with zmq.Context() as other:
        server, _address = server_of(other, ClusterKey.generate())
        server.close()
        assert not collecting.is_alive()


def test_a_key_shows_no_secret_and_survives_its_bytes() -> None:
    key = ClusterKey.generate()
    assert key.to_bytes().decode() not in repr(key)
    assert ClusterKey.from_bytes(key.to_bytes()) == key
    assert ClusterKey.generate() != key


@pytest.mark.parametrize("data", [b"", b"short", b"x" * 41, b"\xff" * 40])
def test_bytes_that_are_no_key_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidClusterKey, match="40 Z85 characters"):
        ClusterKey.from_bytes(data)
