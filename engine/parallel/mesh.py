"""A rank's sockets to some others of its group: each message goes to all of them, and messages arrive in order.

    rank 0   PULL <──────── PUSH   rank 1      each binds one, and connects to that of every other one: once
             PUSH ────────> PULL

A rank is lost when a connection to it, made by this rank, ends; then this rank closes the groups, which ends any
collective that waits there. Other connections to its own port, as of a health check or a scanner, do not matter:
messages without the key that ranks exchange at their rendezvous are dropped.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import zmq

from ..net.sockets import endpoint, is_ipv6, is_ipv6_url
from .groups import GroupFailed, ParallelGroups
from .member import Member
from .rendezvous import RendezvousClient
from .watch import Watch, beat, inproc_pair

logger = logging.getLogger(__name__)

_END = b""  # in place of a message: this rank ends as it should
_LINGER_MS = 1000
_GRACE_S = 1.0  # for a rank's last message to be read before its end counts as a loss
_MAX_UNREAD = 1000  # messages to one rank: far more than are ever under way
_MAX_BYTES = 1 << 30  # of a message: a stranger may announce any number
_REASON_S = 2.0  # for the rendezvous to say why a rank has gone: it may have gone with it


class Mesh:
    """One rank's end, which listens at `address`. One thread sends and closes it, one may receive."""

    def __init__(
        self,
        name: str,
        member: Member,
        rendezvous: RendezvousClient,
        groups: ParallelGroups,
        others: Sequence[int],
        *,
        grace_s: float = _GRACE_S,
    ) -> None:
        """Connect to all `others`, which use the same `name`, in both directions.

        `grace_s`: none where the others never end by themselves. Raises `GroupFailed`.
        """
        self._name, self._rendezvous, self._groups, self._grace_s = name, rendezvous, groups, grace_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._addresses = Addresses(member)
        self._key = secrets.token_hex(8).encode()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.set_hwm(0)
        self._pull.maxmsgsize = _MAX_BYTES
        self._peers: dict[zmq.Socket[bytes], tuple[str, bytes]] = {}  # names and keys of peers
        self._num_dropped = 0
        self.loss: str | None = None  # the name of a rank that has gone
        self._ended = threading.Event()  # a rank has said that it ends
        self._bell, self._ringer = inproc_pair(self._context)
        self._watch = Watch(self._context, self._lose)
        try:
            self._connect(member, others)
        except BaseException:  # Ctrl-C, too: a context that is freed with open sockets would wait for them for ever
            self._give_back(linger=0)
            raise
        self._watch.start()
        self._poller = zmq.Poller()
        for socket in (self._pull, self._bell):
            self._poller.register(socket, zmq.POLLIN)

    def send(self, message: bytes) -> None:
        """Send to all and return at once. Raises `GroupFailed` if one has gone."""
        self.check()
        for socket, (name, key) in self._peers.items():
            try:
                socket.send_multipart([key, message], zmq.NOBLOCK)
            except zmq.Again:
                raise GroupFailed(f"{name} takes nothing any more") from None

    def receive(self) -> bytes | None:
        """Wait for the next message, without polling. Returns None when another rank, or this one, ends regularly.

        Raises `GroupFailed` if a rank has gone.
        """
        while True:
            if self._pull not in dict(self._poller.poll()):
                self.check()
                return None
            key, *message = self._pull.recv_multipart()
            if key != self._key or len(message) != 1:
                self._drop()
            elif message[0] == _END:
                self._ended.set()
                return None
            else:
                return message[0]

    def check(self) -> None:
        """Raise `GroupFailed` if a rank has gone."""
        if self.loss is None:
            return
        try:
            reason = self._rendezvous.failure(_REASON_S)
        except GroupFailed:  # the process that kept the rendezvous has gone
            reason = None
        raise GroupFailed(reason or f"{self.loss} has gone")

    def close(self, *, well: bool, receiver: threading.Thread | None = None) -> None:
        """Tell the other ranks that this one ends; not after a failure: they notice that.

        `receiver` is the thread that receives, if that is another one: it ends first. A second call does nothing.
        """
        if self._context.closed:
            return
        known = self._ended.is_set()  # to all: the rank that ended first has told the others
        self._ended.set()
        self._watch.close()
        if receiver is not None:
            self._ring()
            receiver.join()
        if well and not known and self.loss is None:
            for socket, (_, key) in self._peers.items():
                with contextlib.suppress(zmq.Again):  # a rank that reads no more notices the disconnection
                    socket.send_multipart([key, _END], zmq.NOBLOCK)
        self._give_back(linger=_LINGER_MS if well else 0)

    def _give_back(self, *, linger: int) -> None:
        self._context.destroy(linger=linger)
        self._addresses.remove()

    def _connect(self, member: Member, others: Sequence[int]) -> None:
        self.address = self._addresses.bind(self._pull, [self._rendezvous.get(f"here/{rank}") for rank in others])
        self._rendezvous.put(f"{self._name}/{member.rank}", f"{self._key.decode()} {self.address}")
        for rank in others:
            key, _, address = self._rendezvous.get(f"{self._name}/{rank}").partition(" ")
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(_MAX_UNREAD)
            self._peers[socket] = f"rank {rank}", key.encode()
            self._watch.add(socket, f"rank {rank}")
            connect(socket, address, member)
        self._watch.wait_connected(member.start_timeout_s, self._rendezvous.check)
        self._rendezvous.put(f"{self._name}/{member.rank}/connected", "")
        for rank in others:
            self._rendezvous.get(f"{self._name}/{rank}/connected")
        self._addresses.remove()

    def _drop(self) -> None:
        self._num_dropped += 1
        if self._num_dropped == 1:
            logger.warning("messages to the port for %s from outside of the group are ignored", self._name)

    def _lose(self, name: str) -> None:
        """Note a lost connection, unless it follows a rank's regular end, which that rank's last message reports."""
        if self._ended.wait(self._grace_s):
            return
        logger.error("%s has gone: the group ends", name)
        self.loss = name
        self._groups.close()
        self._ring()

    def _ring(self) -> None:
        """End a waiting `receive`, and all later ones. Only the watch calls it, while there is one."""
        self._ringer.send(b"", zmq.NOBLOCK)


_MAX_UNIX_PATH = 100
# Never, in effect. With ZMQ's own value for never (-1), messages that arrived before a loss are dropped, and a
# connection that cannot be made is not reported; with this one it is, and the watch ends the wait.
_NOT_SOON_MS = 3_600_000
_CONNECT_MS = 10_000  # to a machine, and as long for its handshake


class Addresses:
    """The addresses of the sockets that one end binds."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._folder: Path | None = None
        self._num_paths = 0

    def bind(self, socket: zmq.Socket[Any], hosts: Iterable[str]) -> str:
        """Bind a socket that members at `hosts` connect to, and return its address. Raises `GroupFailed`."""
        member = self._member
        if all(host == member.host for host in hosts):
            path = self._new_path()
            if len(path) < _MAX_UNIX_PATH:
                socket.bind(f"ipc://{path}")
                return f"ipc://{path}"
        beat(socket)
        if member.secure_server is not None:
            member.secure_server(socket)
        socket.ipv6 = is_ipv6(member.host)
        try:
            socket.bind(f"tcp://{endpoint(member.host, '*')}")
        except zmq.ZMQError as error:
            raise GroupFailed(f"rank {member.rank} cannot listen at {member.host}: {error}") from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def remove(self) -> None:
        """Remove the sockets' files, so that a process killed later leaves none. Existing connections stay."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _new_path(self) -> str:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="baton-"))  # for this user only
        self._num_paths += 1
        return str(self._folder / str(self._num_paths))


def connect(socket: zmq.Socket[Any], address: str, member: Member) -> None:
    """Connect to another member's address, without reconnecting: after a loss, messages would be missing unnoticed.

    Where nobody answers, `Watch.wait_connected` says so at once.
    """
    socket.reconnect_ivl = _NOT_SOON_MS
    socket.handshake_ivl = _CONNECT_MS
    if address.startswith("tcp:"):
        beat(socket)
        socket.connect_timeout = _CONNECT_MS
        socket.ipv6 = is_ipv6_url(address)
        if member.secure_client is not None:
            member.secure_client(socket)
    socket.connect(address)
