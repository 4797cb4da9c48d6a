"""The HTTP front of the cluster: OpenAI's API in, engine requests out. No ray here.

app ──> middleware ──> api ──> serving ──> routing, engines
"""

from .app import create_app, reconfigure_app
from .model import ServedModel
from .settings import GatewaySettings

__all__ = ["GatewaySettings", "ServedModel", "create_app", "reconfigure_app"]
