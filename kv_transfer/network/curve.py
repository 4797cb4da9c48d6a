"""One CURVE key pair for the whole cluster: whoever holds it may talk, nobody else.

The pair is made once and handed to every process. Servers and clients use the same pair, so a peer proves twice that it
belongs: it must know the server's public key to say hello, and a ZAP handler in the server's context lets only clients
in whose own, proven public key is the cluster's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import zmq
from zmq.auth.base import Authenticator

from ..errors import InvalidClusterKey

logger = logging.getLogger(__name__)

KEY_BYTES = 40  # a CURVE key in Z85


class ClusterKey:
    """The cluster's key pair. Pickles; `to_bytes` and `from_bytes` carry it where pickle may not go.

    `secure_server` before `bind`, `secure_client` before `connect`; plain and asyncio sockets alike.
    """

    def __init__(self, secret: bytes) -> None:
        try:
            self._public = zmq.curve_public(secret)
        except (ValueError, TypeError, zmq.ZMQError) as error:
            raise InvalidClusterKey(
                f"a cluster key is {KEY_BYTES} Z85 characters; got {len(secret)} bytes that are none"
            ) from error
        self._secret = secret

    @classmethod
    def generate(cls) -> ClusterKey:
        return cls(zmq.curve_keypair()[1])

    @classmethod
    def from_bytes(cls, data: bytes) -> ClusterKey:
        """Inverse of `to_bytes`. Raises `InvalidClusterKey`."""
        return cls(data)

    def to_bytes(self) -> bytes:
        """The secret itself: for the memory and the wires of the cluster only, never for a log."""
        return self._secret

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """From now on `socket` accepts holders of this key only."""
        domain = self._public.decode()
        _gatekeeper_of(socket.context).admit(domain, self._public)
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.curve_publickey = self._public
        socket.zap_domain = domain.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # otherwise libzmq lets everyone in where nobody answers

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """`socket` proves that it holds this key, and talks to servers that hold it only."""
        socket.curve_serverkey = self._public
        socket.curve_secretkey = self._secret
        socket.curve_publickey = self._public

    def __reduce__(self) -> tuple[type[ClusterKey], tuple[bytes]]:
        return ClusterKey, (self._secret,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterKey) and other._secret == self._secret

    def __hash__(self) -> int:
        return hash(self._secret)

    def __repr__(self) -> str:
        return f"ClusterKey(public={self._public.decode()[:8]}...)"


class _Gatekeeper:
    """Answers libzmq's question "may this key come in?" for all server sockets of one context.

    Its socket belongs to a shadow of the context: `Context.destroy` of the owner, which closes sockets from the wrong
    thread, does not see it, and `Context.term` ends the thread.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._authenticator = Authenticator(zmq.Context.shadow(context.underlying))
        self._authenticator.start()
        self._underlying = context.underlying
        self._thread = threading.Thread(target=self._run, name="baton-zap", daemon=True)
        self._thread.start()

    def admit(self, domain: str, public: bytes) -> None:
        self._authenticator.configure_curve_callback(domain, _OneKey(public))

    def _run(self) -> None:
        loop = asyncio.new_event_loop()  # the authenticator's handler is a coroutine, though it never waits
        try:
            while True:
                request = self._authenticator.zap_socket.recv_multipart()
                loop.run_until_complete(self._authenticator.handle_zap_message(request))
        except zmq.ContextTerminated:
            pass
        except zmq.ZMQError as error:
            logger.error("the gatekeeper of CURVE sockets stopped, so no new connection is accepted: %s", error)
        finally:
            # Without the lock: who holds it may be collecting the context, and wait for this thread.
            _gatekeepers.pop(self._underlying, None)
            self._authenticator.stop()
            loop.close()


class _OneKey:
    """A credentials provider that knows a single key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


_gatekeepers: dict[int, _Gatekeeper] = {}
_gatekeepers_lock = threading.Lock()


def _gatekeeper_of(context: zmq.Context[Any]) -> _Gatekeeper:
    with _gatekeepers_lock:
        gatekeeper = _gatekeepers.get(context.underlying)
        if gatekeeper is None:
            gatekeeper = _gatekeepers[context.underlying] = _Gatekeeper(context)
        return gatekeeper
