"""One group's entry in the directory: registered, kept by heartbeats, marked as draining, removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray

from baton.cluster.contracts import Drained, EngineGroup, EnginePulse
from baton.cluster.membership.directory_client import DirectoryClient, stay_registered
from baton.cluster.membership.members import HeartbeatReply

logger = logging.getLogger(__name__)


class GroupRegistration:
    """Keeps a group listed from `start` until `leave`. Calls that do not reach the directory are logged."""

    def __init__(self, directory: DirectoryClient, group: EngineGroup, actor_names: Sequence[str]) -> None:
        """`actor_names` are those of the group's processes, which the directory watches."""
        self.group = group
        self._directory = directory
        self._actor_names = list(actor_names)
        self._heartbeats: asyncio.Task[None] | None = None

    def start(self, on_reply: Callable[[HeartbeatReply], None]) -> asyncio.Task[None]:
        """Start the task that registers the group and sends its heartbeats. `on_reply` gets the directory's replies."""
        name, epoch = self.group.group_id, self.group.epoch
        self._heartbeats = asyncio.create_task(
            stay_registered(self._directory, name, epoch, self.register, on_reply=on_reply)
        )
        return self._heartbeats

    async def register(self) -> None:
        """List the group, with its ranks. Raises Ray's errors."""
        listed: EngineGroup = await self._directory.call("register_group", self.group, self._actor_names)
        self.group = listed.with_draining(self.group.draining)  # draining may have begun during the call

    async def set_draining(self, draining: bool) -> bool:
        """Tell the directory whether the group drains; return whether the call arrived."""
        # A restarted directory learns it from the next registration.
        self.group = self.group.with_draining(draining)
        return await self._call("drain", draining)

    async def report(self, pulses: list[EnginePulse]) -> None:
        """Report the engines' pulses to the autoscaler."""
        await self._call("report_group", pulses)

    async def leave(self, why: str = "") -> None:
        """Send no more heartbeats, and remove the group. `why` names the failure that ended it, if one did."""
        self._end_heartbeats()
        await self._call("leave", why)

    async def leave_drained(self, drained: Drained) -> None:
        """Send no more heartbeats, and remove the group, whose drain the directory counts."""
        self._end_heartbeats()
        await self._call("drained", drained)

    def _end_heartbeats(self) -> None:
        if self._heartbeats is not None:  # another one would register the group again
            self._heartbeats.cancel()

    async def _call(self, method: str, *args: Any) -> bool:
        """Call the directory; return whether the call arrived.

        Heartbeats, or their absence, replace most lost calls.
        """
        name = self.group.group_id
        try:
            await self._directory.call(method, name, self.group.epoch, *args)
        except ray.exceptions.RayError as error:
            logger.warning("the call %s for %s did not reach the directory: %s", method, name, type(error).__name__)
            return False
        return True
