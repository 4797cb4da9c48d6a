"""Which transport the settings mean."""

from __future__ import annotations

from baton.engine.core.layout import KVRegion

from ..affinity import pin_thread
from ..errors import TransportError
from ..pacing import sleep_precisely
from ..settings import TransferSettings
from . import Transport
from .nixl import NixlTransport
from .ucx import UcxTransport

START_TIMEOUT_S = 60.0


def open_transport(settings: TransferSettings, region: KVRegion, agent_name: str) -> Transport:
    """For the calling thread, which alone uses it, runs from now on where the settings say, and sleeps precisely.

    Raises `TransportError` where the region cannot be registered.
    """
    pin_thread(settings.cpu_affinity, region.device)
    sleep_precisely()
    match settings.transport:
        case "nixl":
            return NixlTransport(region, agent_name, settings.backends)
        case "ucx":
            return UcxTransport(region, agent_name)
    raise TransportError(f"no transport {settings.transport!r}; there are: nixl, ucx")
