"""What an application is made of, from the words of a config file to what is asked of Ray and of the engines."""

from .application import NOT_AN_ENGINES, REPLICA_CPUS, Bundle, FleetSpec
from .files import has_model, load_spec, specs_in_file
from .parts import Fleet, GatewaySpec, KVTiers
from .strict import InvalidSpec

__all__ = [
    "NOT_AN_ENGINES",
    "REPLICA_CPUS",
    "Bundle",
    "Fleet",
    "FleetSpec",
    "GatewaySpec",
    "InvalidSpec",
    "KVTiers",
    "has_model",
    "load_spec",
    "specs_in_file",
]
