"""A rank's sockets to other ranks of its group. Each message goes to all of them, and messages arrive in order.

    rank 0   PULL <──────── PUSH   rank 1      each rank binds one PULL socket, and connects to that of every
             PUSH ────────> PULL               other rank, once

A rank counts as lost when a connection that this rank made to it ends. Then this rank closes the groups, which ends any
collective that waits for the lost rank. Other connections to this rank's port, as by a health check or a scanner, do no
harm: messages without the key that the ranks exchanged at their rendezvous are dropped.
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

from ..net.sockets import bind_to_free_port, is_ipv6_url
from ..net.wakeup import WakeupSocket
from .groups import GroupFailed, ParallelGroups
from .member import Member
from .rendezvous import RendezvousClient
from .watch import Watch, beat

logger = logging.getLogger(__name__)

_END = b""  # instead of a message: this rank ends regularly
_LINGER_MS = 1000
_GRACE_S = 1.0  # time to read a rank's last message, before its end counts as a loss
_MAX_UNREAD = 1000  # messages to one rank: far more than are ever in flight
_MAX_BYTES = 1 << 30  # of a message: a stranger may announce any size
_REASON_S = 2.0  # wait for the rendezvous to say why a rank has gone; it may have gone with that rank


class Mesh:
    """One rank's end, which listens at `address`. One thread sends and closes it, another may receive."""

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

        `grace_s` is 0 if the others never end by themselves. Raises `GroupFailed`.
        """
        self._name, self._rendezvous, self._groups, self._grace_s = name, rendezvous, groups, grace_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._addresses = Addresses(member)
        self._key = secrets.token_hex(8).encode()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.set_hwm(0)
        self._pull.maxmsgsize = _MAX_BYTES
        self._peers: dict[zmq.Socket[bytes], tuple[str, bytes]] = {}  # name and key of each peer
        self._num_dropped = 0
        self.loss: str | None = None  # the name of a rank that has gone
        self._ended = threading.Event()  # set once some rank ends regularly
        # Ends a waiting `receive` and, as it is never drained, all later ones. While the watch runs, only it wakes.
        self._wakeup = WakeupSocket(self._context)
        self._watch = Watch(self._context, self._lose)
        try:
            self._connect(member, others)
        except BaseException:  # Ctrl-C, too: a context that is freed with open sockets would wait for them forever
            self._give_back(linger=0)
            raise
        self._watch.start()
        self._poller = zmq.Poller()
        for socket in (self._pull, self._wakeup.socket):
            self._poller.register(socket, zmq.POLLIN)

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks and return at once. Raises `GroupFailed` if one has gone."""
        self.check()
        for socket, (name, key) in self._peers.items():
            try:
                socket.send_multipart([key, message], zmq.NOBLOCK)
            except zmq.Again:
                raise GroupFailed(f"{name} no longer reads its messages") from None

    def receive(self) -> bytes | None:
        """Wait for the next message, without polling. Returns None when this rank or another one ends regularly.

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
        except GroupFailed:  # the process that served the rendezvous has gone
            reason = None
        raise GroupFailed(reason or f"{self.loss} has gone")

    def close(self, *, orderly: bool, receiver: threading.Thread | None = None) -> None:
        """Close the connections. With `orderly`, tell the other ranks first; else they notice a loss.

        `receiver`, the thread that receives, if it is another one, is ended first. A second call does nothing.
        """
        if self._context.closed:
            return
        known = self._ended.is_set()  # then all ranks know: the one that ended first has told them
        self._ended.set()
        self._watch.close()
        if receiver is not None:
            self._wakeup.wake()
            receiver.join()
        if orderly and not known and self.loss is None:
            for socket, (_, key) in self._peers.items():
                with contextlib.suppress(zmq.Again):  # a rank that no longer reads notices the disconnection
                    socket.send_multipart([key, _END], zmq.NOBLOCK)
        self._give_back(linger=_LINGER_MS if orderly else 0)

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
        """Note a lost connection, unless a rank has ended regularly, as its last message would say."""
        if self._ended.wait(self._grace_s):
            return
        logger.error("%s has gone: the group ends", name)
        self.loss = name
        self._groups.close()
        self._wakeup.wake()


_MAX_UNIX_PATH = 100
# In effect never. With ZMQ's own value for never (-1), messages that arrived before a loss would be dropped, and a
# failure to connect would not be reported. With this value it is, and the watch ends the wait.
_NOT_SOON_MS = 3_600_000
_CONNECT_MS = 10_000  # limit for the connection to a machine, and again for its handshake


class Addresses:
    """The addresses of the sockets that one rank binds."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._folder: Path | None = None
        self._num_paths = 0

    def bind(self, socket: zmq.Socket[Any], hosts: Iterable[str]) -> str:
        """Bind a socket to which members at `hosts` connect. Returns its address. Raises `GroupFailed`."""
        member = self._member
        if all(host == member.host for host in hosts):
            path = self._new_path()
            if len(path) < _MAX_UNIX_PATH:
                socket.bind(f"ipc://{path}")
                return f"ipc://{path}"
        beat(socket)
        if member.secure_server is not None:
            member.secure_server(socket)
        try:
            return bind_to_free_port(socket, member.host)
        except zmq.ZMQError as error:
            raise GroupFailed(f"rank {member.rank} cannot listen at {member.host}: {error}") from error

    def remove(self) -> None:
        """Remove the sockets' files, so that a process killed later leaves none. Existing connections are kept."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _new_path(self) -> str:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="baton-"))  # for this user only
        self._num_paths += 1
        return str(self._folder / str(self._num_paths))


def connect(socket: zmq.Socket[Any], address: str, member: Member) -> None:
    """Connect to another member's address. It never reconnects, because messages could be lost in between unnoticed.

    If nothing listens there, `Watch.wait_connected` reports that at once.
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
