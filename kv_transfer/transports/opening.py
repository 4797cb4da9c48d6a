"""Which transport the settings mean."""

from __future__ import annotations

from baton.engine.core.layout import KVRegion

from ..errors import TransportError
from ..settings import TransferSettings
from . import Transport
from .nixl import NixlTransport

START_TIMEOUT_S = 60.0


def open_transport(settings: TransferSettings, region: KVRegion, agent_name: str) -> Transport:
    """For the calling thread, which alone uses it. Raises `TransportError` where the region cannot be registered."""
    if settings.transport != NixlTransport.name:
        raise TransportError(f"no transport {settings.transport!r}; there is: {NixlTransport.name}")
    return NixlTransport(region, agent_name, settings.backends)
