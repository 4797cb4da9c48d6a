"""Open the transport that the settings name."""

from __future__ import annotations

import logging

from baton.engine.core.layout import KVRegion

from ..affinity import pin_thread
from ..errors import NotRegistrable, TransportError
from ..pacing import sleep_precisely
from ..settings import TransferSettings
from . import Transport
from .cuda_ipc import CudaIpcTransport
from .fastest import FastestTransport
from .nixl import NixlTransport
from .ucx import UcxTransport

START_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


def open_transport(settings: TransferSettings, region: KVRegion, agent_name: str) -> Transport:
    """Open a transport for the calling thread, pin that thread to CPUs, and make it wake up on time.

    Raises `TransportError` where the region cannot be registered.
    """
    pin_thread(settings.cpu_affinity, region.device)
    sleep_precisely()
    network = _network(settings, region, agent_name)
    direct = _direct(region, agent_name)
    return FastestTransport(network, direct, agent_name, on_gpu=region.device != "cpu")


def _network(settings: TransferSettings, region: KVRegion, agent_name: str) -> Transport:
    match settings.transport:
        case "nixl":
            return NixlTransport(region, agent_name, settings.backends)
        case "ucx":
            return UcxTransport(region, agent_name)
    raise TransportError(f"no transport {settings.transport!r}; there are: nixl, ucx")


def _direct(region: KVRegion, agent_name: str) -> Transport | None:
    """Return the transport between GPUs of one machine; None, with one log line, for memory that cannot be shared."""
    if region.device == "cpu":
        return None
    try:
        return CudaIpcTransport(region, agent_name)
    except NotRegistrable as error:
        logger.warning("peers on this machine will read these blocks over the network: %s", error)
        return None
