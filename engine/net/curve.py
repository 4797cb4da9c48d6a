"""The cluster's CURVE key pair: only processes that hold it can connect.

The pair is made once and given to every process. Servers and clients use the same pair, and a client proves twice that
it holds it: it must know the server's public key to begin a handshake, and a ZAP handler in the server's context
accepts only clients whose own, proven public key is the cluster's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import zmq
from zmq.auth.base import Authenticator

logger = logging.getLogger(__name__)

KEY_BYTES = 40  # a CURVE key in Z85


class InvalidClusterKey(ValueError):
    """The bytes are not a cluster key."""


class ClusterKey:
    """The cluster's key pair. It can be pickled; where pickle is not allowed, use `to_bytes` and `from_bytes`.

    Call `secure_server` before `bind` and `secure_client` before `connect`; plain and asyncio sockets both work.
    """

    def __init__(self, secret: bytes) -> None:
        try:
            self._public = zmq.curve_public(secret)
        except (ValueError, TypeError, zmq.ZMQError) as error:
            raise InvalidClusterKey(
                f"a cluster key is {KEY_BYTES} Z85 characters; got {len(secret)} bytes that are not"
            ) from error
        self._secret = secret

    @classmethod
    def generate(cls) -> ClusterKey:
        return cls(zmq.curve_keypair()[1])

    @classmethod
    def from_bytes(cls, data: bytes) -> ClusterKey:
        """Invert `to_bytes`. Raises `InvalidClusterKey`."""
        return cls(data)

    def to_bytes(self) -> bytes:
        """Return the secret itself. It must never be logged or stored outside the cluster."""
        return self._secret

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` accept only clients that hold this key."""
        domain = self._public.decode()
        _zap_handler_of(socket.context).admit(domain, self._public)
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.curve_publickey = self._public
        socket.zap_domain = domain.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # or else libzmq accepts every client if no handler answers

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Make `socket` prove that it holds this key, and connect only to servers that hold it too."""
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


class _ZapHandler:
    """A ZAP handler: decides which client keys the server sockets of one context accept.

    Its socket belongs to a shadow of the context. So the owner's `Context.destroy`, which would close the socket from
    the wrong thread, does not see it, and `Context.term` ends the handler's thread.
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
            logger.error("the ZAP handler of CURVE sockets stopped, so no new connection is accepted: %s", error)
        finally:
            # Take no lock here: its holder may be collecting the context, and waiting for this thread.
            _zap_handlers.pop(self._underlying, None)
            self._authenticator.stop()
            loop.close()


class _OneKey:
    """A credentials provider that accepts a single key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


_zap_handlers: dict[int, _ZapHandler] = {}
_zap_handlers_lock = threading.Lock()


def _zap_handler_of(context: zmq.Context[Any]) -> _ZapHandler:
    with _zap_handlers_lock:
        handler = _zap_handlers.get(context.underlying)
        if handler is None:
            handler = _zap_handlers[context.underlying] = _ZapHandler(context)
        return handler
