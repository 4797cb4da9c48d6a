"""Opens the transport that the settings ask for: its parts, on the CPUs that they name."""

from __future__ import annotations

import logging

from ..affinity import pin_thread
from ..devices import use_device
from ..errors import NotRegistrable, TransportError
from ..pacing import sleep_precisely
from ..settings import TransferSettings
from . import Memory, Transport
from .common import make_scratch
from .cuda_ipc import CudaIpcTransport
from .fastest import FastestTransport
from .nixl import NixlTransport
from .range_copies import ALIGNMENT, GpuCopies
from .staged import StagedTransport
from .staged_buffers import BounceBuffers
from .ucx import UcxTransport

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0


def open_transport(settings: TransferSettings, region: Memory, agent_name: str) -> Transport:
    """Open a transport for the calling thread, pin that thread to CPUs, and make it wake up on time.

    Raises `TransportError` if the region cannot be registered.
    """
    pin_thread(settings.cpu_affinity, region.device)
    sleep_precisely()
    network = _network(settings, region, agent_name)
    direct = _direct(region, agent_name)
    staged = _staged(settings, region, agent_name)
    return FastestTransport(
        network, direct, agent_name, on_gpu=region.device != "cpu", staged=staged, patience_s=settings.connect_s
    )


def _network(settings: TransferSettings, region: Memory, agent_name: str) -> Transport:
    match settings.transport:
        case "nixl":
            return NixlTransport(region, agent_name, settings.backends)
        case "ucx":
            return UcxTransport(region, agent_name)
    raise TransportError(f"no transport {settings.transport!r}; there are: nixl, ucx")


def _direct(region: Memory, agent_name: str) -> Transport | None:
    """Return the transport between GPUs of one machine. None: a CPU, or GPU memory that cannot be shared (logged)."""
    if region.device == "cpu":
        return None
    try:
        return CudaIpcTransport(region, agent_name)
    except NotRegistrable as error:
        logger.warning("engines on this machine and this one will read each other over the network: %s", error)
        return None


def _staged(settings: TransferSettings, region: Memory, agent_name: str) -> Transport | None:
    """Return the transport through host memory. None: the blocks are in it, or it is not wanted or cannot be had."""
    gpu = use_device(region.device)
    if gpu is None or settings.buffer != "auto" or settings.transport != "nixl":
        return None
    try:
        buffers = BounceBuffers.allocate(region.device)
        network = NixlTransport(buffers, f"{agent_name}:staged", settings.backends)
    except TransportError as error:
        logger.warning("peers with slow lanes will not be read through pinned memory: %s", error)
        return None
    scratch, copies = make_scratch(region.device), (GpuCopies(gpu), GpuCopies(gpu))
    copies[0].compile(scratch.address, scratch.address + ALIGNMENT)
    return StagedTransport(region, network, buffers, *copies, scratch)
