"""Files for `ray up`, by Ray's own rules."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidSpec


@dataclass(frozen=True)
class RayCluster:
    """Machines that `ray up` would start Ray on."""

    name: str
    max_workers: int  # beside the head
    tcp_only: str = ""  # the setting of UCX with which machines reach each other by TCP alone, such as `UCX_TLS=tcp`


def is_ray_cluster(content: Mapping[str, Any]) -> bool:
    """Tell whether a file describes a Ray cluster rather than applications: Ray requires this key."""
    return "cluster_name" in content


def load_ray_cluster(content: Mapping[str, Any]) -> RayCluster:
    """Check a cluster file, and ask no cloud or machine. Raises `InvalidSpec` where `ray up` would refuse it."""
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    logging.getLogger("ray.autoscaler").setLevel(logging.WARNING)  # it logs the defaults that it fills in
    provider = content.get("provider")
    if not (isinstance(provider, Mapping) and "type" in provider):
        raise InvalidSpec("provider: give `type: local`, `aws` or another that Ray knows, and what belongs to it")
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):  # it raises what it prints, too
            config = prepare_config(dict(content))
            validate_config(config)
    except jsonschema.ValidationError as error:
        place = ".".join(map(str, error.absolute_path))
        raise InvalidSpec(f"{place}: {error.message}" if place else error.message) from None
    except Exception as error:  # Ray's errors have no common type
        raise InvalidSpec(f"`ray up` would refuse it: {type(error).__name__}: {error}") from error
    sys.stderr.write(output.getvalue())
    return RayCluster(config["cluster_name"], config["max_workers"], _tcp_only(content))


START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
WITHIN_A_MACHINE = {"self", "sm", "shm", "posix", "sysv", "cma", "knem", "xpmem"} | {
    *("cuda", "cuda_copy", "cuda_ipc", "gdr_copy"),
}  # UCX's names of transports that leave none


def _tcp_only(content: Mapping[str, Any]) -> str:
    """Return the setting of `UCX_TLS` in the commands that start Ray which leaves only TCP between machines."""
    commands = [str(command) for key in START_COMMANDS for command in content.get(key) or ()]
    for name in re.findall(r"\bUCX_TLS=[\"']?([\w,]+)", "\n".join(commands)):
        transports = set(name.split(","))
        if "tcp" in transports and transports - {"tcp"} <= WITHIN_A_MACHINE:
            return f"UCX_TLS={name}"
    return ""
