"""A connector for the benchmark that records the time of each stage of a hand-off.

    reader   asked ─> thread awake ─> claim sent ─> read posted ─> read done ─> grant here ─> told ─> answered
    holder                              └─> claim here ─> grant sent ───────────────┘

Stamps are times of the machine's monotonic clock, so those of two processes can be compared.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..channel import Channel, Route
from ..connector import TransferConnector
from ..group.tp_read_group import TpReadGroup
from ..handoff.coordinator import HandoffCoordinator
from ..protocol.messages import Claim, Granted, decode
from ..transports import Lane, PeerHandle, PeerState, Ranges, ReadHandle, ReadState, Transport


class HandoffStage(enum.StrEnum):
    """Stages of a hand-off, in about this order. A stage that happens several times keeps its last stamp."""

    ASKED = "asked"
    AWAKE = "transfer thread awake"
    CLAIM_SENT = "claim sent"
    CLAIM_HERE = "claim here, holder"
    GRANT_SENT = "grant sent, holder"
    READ_POSTED = "read posted"
    READ_DONE = "read seen done"
    GRANT_HERE = "grant here"
    ENGINE_NOTIFIED = "engine notified"
    ANSWERED = "engine has it"


class Stamps:
    """The stamps of one engine, written by its transfer thread and by the caller.

    The benchmark takes them when the other engine has received everything. The thread that sends the last message may
    not have stamped it by then, so it holds `sending` until it has.
    """

    def __init__(self) -> None:
        self.sending = threading.Lock()
        self._at: dict[HandoffStage, float] = {}
        self._messages: list[tuple[float, dict[type, HandoffStage], bytes]] = []  # decoded later, in `take`

    def note(self, stage: HandoffStage) -> None:
        self._at[stage] = time.perf_counter()

    def note_message(self, meanings: dict[type, HandoffStage], data: bytes) -> None:
        """Stamp a message. `take` decodes it and looks up the stage of its type in `meanings`."""
        self._messages.append((time.perf_counter(), meanings, data))

    def take(self) -> dict[HandoffStage, float]:
        """Return and forget the stamps, in seconds of `time.perf_counter`."""
        with self.sending:
            at, messages, self._at, self._messages = self._at, self._messages, {}, []
        for moment, meanings, data in messages:
            stage = meanings.get(type(decode(data)))
            if stage is not None:
                at[stage] = moment
        return at


class StampedChannel:
    """A `Channel` that stamps claims and grants."""

    def __init__(self, channel: Channel, stamps: Stamps) -> None:
        self._channel = channel
        self._stamps = stamps
        self.address = channel.address

    def connect(self, address: str) -> Route:
        return self._channel.connect(address)

    def disconnect(self, route: Route) -> None:
        self._channel.disconnect(route)

    def send(self, route: Route, data: bytes) -> bool:
        with self._stamps.sending:
            sent = self._channel.send(route, data)
            self._stamps.note_message({Claim: HandoffStage.CLAIM_SENT, Granted: HandoffStage.GRANT_SENT}, data)
        return sent

    def receive(self) -> list[tuple[Route, bytes]]:
        arrived = self._channel.receive()
        for _, data in arrived:
            self._stamps.note_message({Claim: HandoffStage.CLAIM_HERE, Granted: HandoffStage.GRANT_HERE}, data)
        return arrived

    def lost(self) -> list[Route]:
        return self._channel.lost()

    def close(self) -> None:
        self._channel.close()


class _StampedTransport:
    """A `Transport` that stamps when a read is posted and when it is seen to be done."""

    def __init__(self, transport: Transport, stamps: Stamps) -> None:
        self._transport = transport
        self._stamps = stamps
        self.name = transport.name

    def metadata(self) -> bytes:
        return self._transport.metadata()

    def add_peer(self, metadata: bytes) -> PeerHandle:
        return self._transport.add_peer(metadata)

    def peer_state(self, peer: PeerHandle) -> PeerState:
        return self._transport.peer_state(peer)

    @property
    def num_fallbacks(self) -> int:
        return self._transport.num_fallbacks

    def lane(self, peer: PeerHandle) -> Lane | None:
        return self._transport.lane(peer)

    def remove_peer(self, peer: PeerHandle) -> None:
        self._transport.remove_peer(peer)

    def read(self, peer: PeerHandle, ranges: Ranges) -> ReadHandle:
        read = self._transport.read(peer, ranges)
        self._stamps.note(HandoffStage.READ_POSTED)
        return read

    def poll(self, read: ReadHandle) -> ReadState:
        state = self._transport.poll(read)
        if state is ReadState.DONE:
            self._stamps.note(HandoffStage.READ_DONE)
        return state

    def release(self, read: ReadHandle) -> bool:
        return self._transport.release(read)

    def progress(self) -> None:
        self._transport.progress()

    def close(self) -> None:
        self._transport.close()


class StampedConnector(TransferConnector):
    """A `TransferConnector` that records the times of its stages in `stamps`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.stamps = Stamps()  # first: the transfer thread begins at once
        super().__init__(*arguments, **options)

    def _open_transport(self) -> Transport:
        return _StampedTransport(super()._open_transport(), self.stamps)

    def _make_handoff(self, channel: Channel, group: TpReadGroup) -> HandoffCoordinator:
        return super()._make_handoff(StampedChannel(channel, self.stamps), group)

    def _commands_given(self) -> Iterator[Callable[[HandoffCoordinator], None]]:
        for command in super()._commands_given():
            self.stamps.note(HandoffStage.AWAKE)
            yield command


def since_asked(
    reader: Mapping[HandoffStage, float], holder: Mapping[HandoffStage, float]
) -> dict[HandoffStage, float]:
    """Convert both sides' stamps to microseconds since the call of the reader's `receive`."""
    of_holder = {stage: holder[stage] for stage in (HandoffStage.CLAIM_HERE, HandoffStage.GRANT_SENT)}
    return {stage: (at - reader[HandoffStage.ASKED]) * 1e6 for stage, at in {**reader, **of_holder}.items()}
