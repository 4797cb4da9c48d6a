"""The HTTP front of the cluster: OpenAI's API in, engine requests out. No ray here.

app ──> middleware ──> api ──> serving ──> routing, engines

Names load on first use: every command and every process of an application reads `settings`, and few need the routes,
whose import takes half a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app as create_app
    from .app import reconfigure_app as reconfigure_app
    from .model import ServedModel as ServedModel
    from .settings import GatewaySettings as GatewaySettings

_HOME = {
    "GatewaySettings": "settings",
    "ServedModel": "model",
    "create_app": "app",
    "reconfigure_app": "app",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
