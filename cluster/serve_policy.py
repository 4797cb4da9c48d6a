"""The autoscaling policy of each fleet's deployment, which runs in Serve's controller and follows the directory."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray.serve.config import AutoscalingContext

from .autoscaling.scaler import FleetTarget
from .contracts import Role
from .membership.directory import NAMESPACE, directory_name

logger = logging.getLogger(__name__)

ASK_S = 1.0  # between two requests to the directory


class FollowDirectory:
    """The policy. Serve calls it several times a second on the controller's event loop, so it must not wait."""

    def __init__(self) -> None:
        self._wanted: FleetTarget | None = None
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = 0.0

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now_s = time.monotonic()
        if (self._asking is None or self._asking.done()) and now_s - self._asked_s >= ASK_S:
            self._asked_s = now_s
            self._asking = asyncio.get_running_loop().create_task(self._ask(context))
        if self._wanted is None:
            return context.target_num_replicas, {}
        return target_replicas(self._wanted, context), {}

    async def _ask(self, context: AutoscalingContext) -> None:
        """Ask the directory for the target. If it does not answer, the last target stays valid."""
        try:
            name = directory_name(context.app_name or "")
            directory = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)  # waits for Ray's head
            role, target = Role(context.deployment_name), context.target_num_replicas
            self._wanted = await asyncio.wait_for(directory.wanted.remote(role, target), timeout=10 * ASK_S)
        except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("the autoscaler of %s does not answer: %s", context.app_name, type(error).__name__)


def target_replicas(wanted: FleetTarget, context: AutoscalingContext) -> int:
    """Return the number of replicas for Serve.

    A group that was told to leave counts until its replica is gone: otherwise Serve would stop another one, too.
    """
    running = {f"{context.deployment_name}-{replica.unique_id}" for replica in context.running_replicas}
    return wanted.replicas + len(running.intersection(wanted.leaving))
