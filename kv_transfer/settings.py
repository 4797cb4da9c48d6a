"""Settings of transfers, and the names of peers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from baton.engine.net.sockets import SHORTEST_SILENCE_S, SILENCE_S

from .affinity import ANY_CPU, NEAR_DEVICE, parse_cpus
from .protocol.messages import MAX_LEASE_S, DigestMode, EngineKey
from .protocol.receive import ReceiveTimeouts

SHORTEST_STALL_S = 2.0  # time of one batch at 1 Gbit/s, and more than threads of a busy machine wait for their turn


class InvalidTransferSettings(ValueError):
    """A setting is out of its range."""


def nixl_name(backends: Iterable[str]) -> str:
    """Return the name that two engines over NIXL must have in common, such as `nixl/LIBFABRIC+UCX`."""
    return f"nixl/{'+'.join(sorted(set(backends)))}"


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine's transfers; times are in seconds. Raises `InvalidTransferSettings`."""

    transport: str = "nixl"  # or "ucx"
    backends: tuple[str, ...] = ("UCX",)  # of NIXL
    cpu_affinity: str = NEAR_DEVICE  # of the transfer thread: "device" (its NUMA node), "any", or CPUs: "0-7,16"
    lease_s: float = 30.0  # how long finished blocks wait for their reader, and again after each claim or renewal
    margin_s: float = 0.5  # a read that ends this close to the end of the lease does not count
    renew_at: float = 0.5  # share of the lease after which a read that still runs renews it
    retry_s: float = 0.5  # an unanswered message is sent again after this
    connect_s: float = 5.0  # a receive fails when the holder's memory cannot be reached within this
    silence_s: float = SILENCE_S  # a peer that is silent for so long is lost: reads of its memory fail
    # A read without progress fails after this. Two batches take 4 s at 1 Gbit/s; and NIXL's UCX should notice a dead
    # connection first, which takes it 10 s (`transports/ucx_process.py`).
    stall_s: float = 20.0
    batch_bytes: int = 256 << 20  # size of one read: 0.7 ms over NVLink; a receive that was given up begins no other
    reads_in_flight: int = 2  # of one receive
    progressive: bool = True  # long prompts are on offer, and their blocks read, while prefill still runs
    buffer: Literal["device", "host", "auto"] = "auto"  # by way of the host's memory: never, always, where needed
    buffer_bytes: int = 4 << 30  # of the host's memory; taken only where blocks go that way
    digest: DigestMode = DigestMode.OFF  # "verify": blocks are used only if their digests match; slow, for debugging

    def __post_init__(self) -> None:
        for name in ("lease_s", "margin_s", "retry_s", "connect_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidTransferSettings(f"{name} is {value}; it must be a positive number of seconds")
        if self.lease_s > MAX_LEASE_S:  # no peer would take such a promise
            raise InvalidTransferSettings(f"lease_s is {self.lease_s:g}; it must be at most {MAX_LEASE_S:g} seconds")
        if not (math.isfinite(self.silence_s) and self.silence_s >= SHORTEST_SILENCE_S):
            raise InvalidTransferSettings(
                f"silence_s is {self.silence_s}; it must be at least {SHORTEST_SILENCE_S:g} seconds"
            )
        if not (math.isfinite(self.stall_s) and self.stall_s >= max(SHORTEST_STALL_S, self.silence_s)):
            raise InvalidTransferSettings(
                f"stall_s is {self.stall_s:g}; it must be at least {SHORTEST_STALL_S:g} seconds, and silence_s"
                f" ({self.silence_s:g}): a peer that is lost is to be noticed first"
            )
        if not self.margin_s + self.retry_s < self.lease_s * (1 - self.renew_at) or not 0 < self.renew_at < 1:
            raise InvalidTransferSettings(
                f"lease_s={self.lease_s:g} and renew_at={self.renew_at:g} leave no time to renew before"
                f" margin_s={self.margin_s:g} and retry_s={self.retry_s:g}:"
                " raise lease_s, or lower renew_at (between 0 and 1), margin_s or retry_s"
            )
        if self.batch_bytes < 1 or self.reads_in_flight < 1 or not self.backends:
            raise InvalidTransferSettings("batch_bytes and reads_in_flight must be at least 1, backends must name one")
        if self.buffer not in ("device", "host", "auto"):
            raise InvalidTransferSettings(f"buffer is {self.buffer!r}; it must be 'device', 'host' or 'auto'")
        if self.buffer_bytes < 1:
            raise InvalidTransferSettings(f"buffer_bytes is {self.buffer_bytes}; it must be a positive number of bytes")
        if self.cpu_affinity not in (NEAR_DEVICE, ANY_CPU):
            try:
                parse_cpus(self.cpu_affinity)
            except ValueError as error:
                raise InvalidTransferSettings(
                    f"cpu_affinity is {self.cpu_affinity!r} ({error}); it must be {NEAR_DEVICE!r}, {ANY_CPU!r}"
                    " or a list of CPUs like '0-7,16'"
                ) from None

    @property
    def transport_name(self) -> str:
        """The transport's name, which must equal a peer's: tickets and handshakes carry it."""
        return nixl_name(self.backends) if self.transport == "nixl" else self.transport

    @property
    def timeouts(self) -> ReceiveTimeouts:
        return ReceiveTimeouts(self.connect_s, self.retry_s, self.margin_s, self.renew_at)


_CHOICES: dict[str, tuple[str, ...]] = {
    "transport": ("nixl", "ucx"),
    "buffer": ("device", "host", "auto"),
    "digest": tuple(DigestMode),
}


def parse_settings(values: Mapping[str, Any]) -> TransferSettings:
    """Parse settings of a configuration file. Raises `InvalidTransferSettings` that names what is allowed."""
    values = dict(values)
    if values.get("digest") is False:  # an unquoted `off` in YAML 1.1
        values["digest"] = DigestMode.OFF.value
    for name, allowed in _CHOICES.items():
        if name in values and values[name] not in allowed:
            named = ", ".join(map(repr, map(str, allowed)))
            raise InvalidTransferSettings(f"{name} is {values[name]!r}; it must be one of {named}")
    try:
        return msgspec.convert(values, TransferSettings)
    except msgspec.ValidationError as error:
        raise InvalidTransferSettings(str(error)) from None


class PeerInfo(msgspec.Struct, frozen=True):
    """An engine that is alive, as the directory knows it."""

    engine_id: str
    epoch: int
    kv_address: str
    fingerprint: str

    @property
    def key(self) -> EngineKey:
        return EngineKey(self.engine_id, self.epoch)
