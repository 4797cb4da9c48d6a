"""Settings of transfers and of the tiers behind an engine's pool, and the names of this engine and its peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, Self

import msgspec
from pydantic import ConfigDict, Field, field_validator, model_validator

from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import HEARTBEAT_TIMEOUT_S, MAX_HEARTBEAT_TIMEOUT_S, MIN_HEARTBEAT_TIMEOUT_S
from baton.engine.strict_model import MOST_BYTES, MOST_TOKENS, StrictModel

from .affinity import ANY_CPU, NEAR_DEVICE, parse_cpus
from .protocol.messages import MAX_LEASE_S, DigestMode, EngineKey
from .protocol.receive_rules import ReceiveTimeouts

SHORTEST_STALL_S = 2.0  # a batch takes as long at 1 Gbit/s; a thread of a busy machine waits less for the CPU
SAVE_S = 5.0


def nixl_name(backends: Iterable[str]) -> str:
    """Return the name that two engines over NIXL must have in common, such as `nixl/LIBFABRIC+UCX`."""
    return f"nixl/{'+'.join(sorted(set(backends)))}"


class TransferSettings(StrictModel):
    """Settings of one engine's transfers; times are in seconds."""

    model_config = ConfigDict(strict=True)

    transport: Literal["nixl", "ucx"] = "nixl"
    backends: tuple[str, ...] = Field(("UCX",), strict=False, min_length=1)  # NIXL's plugins
    cpu_affinity: str = NEAR_DEVICE  # of the transfer thread: "device" (its NUMA node), "any", or CPUs: "0-7,16"
    # The holder keeps offered blocks for so long, counted anew from each claim or renewal.
    lease_s: float = Field(30.0, gt=0, le=MAX_LEASE_S)  # messages carry no longer one
    # A read that ends within this time before the lease does is discarded.
    margin_s: float = Field(0.5, gt=0, le=MAX_LEASE_S)
    renew_at: float = Field(0.5, gt=0, lt=1)  # fraction of the lease after which a reader that is not done renews it
    retry_s: float = Field(0.5, gt=0, le=MAX_LEASE_S)  # an unanswered message is sent again after so long
    # A receive fails if the holder's memory cannot be reached within this time. A lane that takes longer to connect is
    # not waited for while others work.
    connect_s: float = Field(5.0, gt=0, le=MAX_LEASE_S)
    # A peer that sends nothing for so long counts as lost: reads of its memory fail.
    heartbeat_timeout_s: float = Field(HEARTBEAT_TIMEOUT_S, ge=MIN_HEARTBEAT_TIMEOUT_S, le=MAX_HEARTBEAT_TIMEOUT_S)
    # A read fails when none of its batches has ended for so long. Two batches take 4 s at 1 Gbit/s; and NIXL's UCX
    # takes 10 s to notice a dead connection, which it should do first (`transports/ucx_process.py`).
    stall_s: float = Field(20.0, ge=SHORTEST_STALL_S, le=MAX_LEASE_S)
    # Size of one batch of a read: 0.7 ms over NVLink. A cancelled receive begins no further batch.
    batch_bytes: int = Field(256 << 20, ge=1, le=MOST_BYTES)
    reads_in_flight: int = Field(2, ge=1, le=1024)  # batches of one receive that run at the same time
    progressive: bool = True  # offer a long prompt's blocks, and let peers read them, while it is still being prefilled
    buffer: Literal["device", "host", "auto"] = "auto"  # staging slots in host memory: never, always, if needed
    # Of host memory for staging slots; allocated only if they are used.
    buffer_bytes: int = Field(4 << 30, ge=1, le=MOST_BYTES)
    # "verify" uses blocks only if their digests match those of the holder. Slow; for debugging.
    digest: DigestMode = Field(DigestMode.OFF, strict=False)

    @field_validator("digest", mode="before")
    @classmethod
    def _off_needs_no_quotes(cls, value: Any) -> Any:
        return DigestMode.OFF if value is False else value  # `off` in YAML 1.1

    @field_validator("cpu_affinity")
    @classmethod
    def _names_cpus(cls, value: str) -> str:
        if value not in (NEAR_DEVICE, ANY_CPU):
            try:
                parse_cpus(value)
            except ValueError as error:
                raise ValueError(
                    f"is {value!r} ({error}), must be {NEAR_DEVICE!r}, {ANY_CPU!r} or a list of CPUs like '0-7,16'"
                ) from None
        return value

    @model_validator(mode="after")
    def _times_fit_together(self) -> Self:
        problems = {}
        if self.stall_s < self.heartbeat_timeout_s:
            problems["stall_s"] = (
                f"is {self.stall_s:g}, must be at least heartbeat_timeout_s ({self.heartbeat_timeout_s:g}): "
                "a lost peer must be detected first"
            )
        if not self.margin_s + self.retry_s < self.lease_s * (1 - self.renew_at):
            problems["lease_s"] = (
                f"is {self.lease_s:g}, and with renew_at {self.renew_at:g} leaves no time to renew before"
                f" margin_s ({self.margin_s:g}) and retry_s ({self.retry_s:g}):"
                " raise lease_s, or lower renew_at, margin_s or retry_s"
            )
        self.refuse(problems)
        return self

    @property
    def transport_name(self) -> str:
        """The transport's name. Tickets and handshakes carry it, since both engines must use the same one."""
        return nixl_name(self.backends) if self.transport == "nixl" else self.transport

    @property
    def timeouts(self) -> ReceiveTimeouts:
        return ReceiveTimeouts(self.connect_s, self.retry_s, self.margin_s, self.renew_at)


@dataclasses.dataclass(frozen=True)
class LocalEngine:
    """The engine of this process, and how its sockets are bound."""

    engine_id: str
    epoch: int  # random per start: a restarted engine has another one
    host: str  # this machine's address for peers and gateways
    key: ClusterKey | None  # of the sockets. None: any process may connect, for tests only

    @property
    def name(self) -> EngineKey:
        return EngineKey(self.engine_id, self.epoch)


class PeerInfo(msgspec.Struct, frozen=True):
    """An engine that is alive, as the directory knows it."""

    engine_id: str
    epoch: int
    kv_address: str
    fingerprint: str

    @property
    def key(self) -> EngineKey:
        return EngineKey(self.engine_id, self.epoch)


class TierSettings(StrictModel):
    """Sizes of the tiers of one rank of an engine. Raises `pydantic.ValidationError` for values that cannot work."""

    host_bytes: int = Field(0, ge=0, le=MOST_BYTES)  # of host memory; 0: no host tier
    disk_path: str = ""  # a folder for this application's engines alone; each has its own files in it
    disk_bytes: int = Field(0, ge=0, le=MOST_BYTES)  # size of these files; 0: no disk tier
    min_tokens: int = Field(256, ge=1, le=MOST_TOKENS)  # a shorter prefix is computed instead of restored

    @model_validator(mode="after")
    def _something_is_kept_somewhere(self) -> Self:
        if bool(self.disk_path) != bool(self.disk_bytes):
            missing = "disk_bytes" if self.disk_path else "disk_path"
            raise ValueError(f"a disk tier needs disk_path and disk_bytes: {missing} is missing")
        if not self.host_bytes and not self.disk_bytes:
            raise ValueError("kv_tiers without a tier: give host_bytes, or disk_path and disk_bytes")
        return self

    @property
    def save_s(self) -> float:
        """Seconds for which an orderly shutdown may save blocks of the host tier to the disk."""
        return SAVE_S if self.host_bytes and self.disk_bytes else 0.0
