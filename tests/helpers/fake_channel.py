"""A network in one process, in virtual time, with faults: the whole `Channel` protocol without sockets."""

from __future__ import annotations

import dataclasses
import itertools
import random

from baton.kv_transfer.channel import MAX_MESSAGE_BYTES, Route

from .virtual_clock import VirtualClock


@dataclasses.dataclass
class NetworkFaults:
    """Dials. Probabilities are per message; a delay that varies reorders."""

    delay_s: tuple[float, float] = (0.0, 0.0)
    drop: float = 0.0
    duplicate: float = 0.0
    junk: float = 0.0  # bytes that nobody sent arrive as well


class FakeNetwork:
    """The addresses at which fake channels find each other. A channel that binds one anew replaces the old one."""

    def __init__(self, clock: VirtualClock, rng: random.Random, faults: NetworkFaults | None = None) -> None:
        self.clock = clock
        self.rng = rng
        self.faults = faults or NetworkFaults()
        self.num_sent = 0
        self._channels: dict[str, FakeChannel] = {}
        self._numbers = itertools.count(1)

    def bind(self, address: str) -> FakeChannel:
        channel = self._channels[address] = FakeChannel(self, address)
        return channel

    def bound(self, address: str) -> FakeChannel:
        return self._channels[address]

    def unbind(self, channel: FakeChannel) -> None:
        if self._channels.get(channel.address) is channel:
            del self._channels[channel.address]

    def number(self) -> int:
        return next(self._numbers)

    def carry(self, sender: FakeChannel, to_address: str, route: Route, data: bytes) -> None:
        """Delivers to whoever is bound to the address on arrival. What is too long ends the connection, as ZMQ does."""
        self.num_sent += 1
        if len(data) > MAX_MESSAGE_BYTES:
            self._cut(sender, to_address, route)
            return
        for _ in range(self._copies()):
            delay = self.rng.uniform(*self.faults.delay_s)
            self.clock.after(delay, lambda: self._deliver(sender, to_address, route, data))
        if self.rng.random() < self.faults.junk:
            self._deliver(sender, to_address, route, self.rng.randbytes(self.rng.randrange(40)))

    def _cut(self, sender: FakeChannel, to_address: str, route: Route) -> None:
        if isinstance(route, bytes):
            sender.break_link(int(route.split(b" ")[0]))
        elif (opener := self._channels.get(to_address)) is not None:
            opener.break_link(route)

    def _deliver(self, sender: FakeChannel, to_address: str, route: Route, data: bytes) -> None:
        target = self._channels.get(to_address)
        if target is not None and not sender.closed:
            target.arrive(route, data)

    def _copies(self) -> int:
        if self.rng.random() < self.faults.drop:
            return 0
        return 2 if self.rng.random() < self.faults.duplicate else 1


class FakeChannel:
    """A `Channel` of a `FakeNetwork`."""

    def __init__(self, network: FakeNetwork, address: str) -> None:
        self.address = address
        self.closed = False
        self._network = network
        self._mesh: dict[int, str] = {}
        self._inbox: list[tuple[Route, bytes]] = []
        self._broken: list[Route] = []

    def connect(self, address: str) -> Route:
        number = self._network.number()
        self._mesh[number] = address
        return number

    def disconnect(self, route: Route) -> None:
        if isinstance(route, int):
            self._mesh.pop(route, None)

    def send(self, route: Route, data: bytes) -> bool:
        if isinstance(route, int):
            # The other end knows the connection by our address and the link's number, and answers by that.
            self._network.carry(self, self._mesh[route], f"{route} {self.address}".encode(), data)
        else:
            number, address = route.decode().split(" ", 1)
            self._network.carry(self, address, int(number), data)
        return True

    def receive(self) -> list[tuple[Route, bytes]]:
        arrived = [(route, data) for route, data in self._inbox if isinstance(route, bytes) or route in self._mesh]
        self._inbox.clear()
        return arrived

    def lost(self) -> list[Route]:
        broken: list[Route] = [route for route in self._broken if route in self._mesh]
        self._broken.clear()
        return broken

    def break_all(self) -> None:
        """Every connection that it opened breaks, and is there again at once."""
        self._broken += self._mesh

    def break_link(self, number: int) -> None:
        """The same to one."""
        self._broken.append(number)

    def arrive(self, route: Route, data: bytes) -> None:
        self._inbox.append((route, data))

    def close(self) -> None:
        self.closed = True
        self._network.unbind(self)
