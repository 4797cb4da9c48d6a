"""The settings of an application: read from files, checked, and turned into Ray resources and engine arguments."""

from .application import FleetSpec
from .deployments import with_user_config
from .files import (
    DEFAULT_NAME,
    applications_in_file,
    has_model,
    is_ray_cluster,
    load_ray_cluster,
    load_spec,
    load_specs,
    read_mapping,
    specs_in_file,
    with_model,
)
from .parts import AutoscalingSpec, Fleet, GatewaySpec, InvalidSpec
from .reservations import REPLICA_CPUS, Bundle, Reservations

__all__ = [
    "DEFAULT_NAME",
    "REPLICA_CPUS",
    "AutoscalingSpec",
    "Bundle",
    "Fleet",
    "FleetSpec",
    "GatewaySpec",
    "InvalidSpec",
    "Reservations",
    "applications_in_file",
    "has_model",
    "is_ray_cluster",
    "load_ray_cluster",
    "load_spec",
    "load_specs",
    "read_mapping",
    "specs_in_file",
    "with_model",
    "with_user_config",
]
