"""The client of the directory: calls of engines and gateways, and the heartbeats that keep them listed.

    HeartbeatThread ─┐
    stay_registered ─┴ register, heartbeat ──┐
    keep_app_alive ──── application_lives ───┼──> DirectoryClient ──> directory
    snapshots <──────── watch ───────────────┘         └── if this process cannot reach it: through another process

Every call has a timeout, because Ray waits for ever for an answer that was lost with a link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import ray

from baton.cluster.contracts import DirectorySnapshot, EngineTrace, StartingGroup

from .directory import HEARTBEAT_S, NAMESPACE, WATCH_S, directory_name, get_directory
from .members import HeartbeatReply

logger = logging.getLogger(__name__)

ANSWER_S = 10.0  # timeout of a call ...
FIRST_ANSWER_S = 60.0  # ... and of the first one, since the directory may be starting
PROFILE_S = 110.0  # in which the traces of all engines are written
MAX_PROXY_CALLS = 20  # calls that one proxy process makes for processes that cannot reach the directory
KEEP_ALIVE_S = 5.0  # between signs of life of a member that is still starting


class DirectoryClient:
    """Calls the directory; a `SnapshotSource` of engine clients.

    If the actor is gone for good, it finds the new one.
    """

    def __init__(self, app: str) -> None:
        self._app = app
        self._actor = get_directory(app)
        self._has_answered = False
        self._newest: DirectorySnapshot | None = None

    async def watch(self, version: int) -> DirectorySnapshot:
        """Return the first snapshot of another version, or the last one after a few seconds. Raises like `call`.

        Members that a restarted directory does not list yet stay in the snapshot until its list is complete.
        """
        last = self._newest
        newer: DirectorySnapshot | None = await self._ask(WATCH_S, "watch", -1 if last is None else version)
        if newer is not None:
            self._newest = newer if last is None else newer.completed_by(last)
        assert self._newest is not None, "no directory has version -1, so the first answer is a snapshot"
        return self._newest

    async def call(self, method: str, *args: Any) -> Any:
        """Call the actor. Raises Ray's errors, and `GetTimeoutError` if there is no answer.

        If the actor is dead, the next call finds its successor.
        """
        return await self._ask(0.0, method, *args)

    async def profile(self, *, start: bool) -> list[EngineTrace]:
        """See `Directory.profile`. Raises like `call`."""
        traces: list[EngineTrace] = await self._ask(PROFILE_S, "profile", start)
        return traces

    async def _ask(self, takes_s: float, method: str, *args: Any) -> Any:
        """Call the actor, which may take `takes_s` to answer.

        Ray tells each process only once where a restarted actor is. A process that was cut off at that time never
        learns it: if it cannot reach the actor, another process makes the call for it.
        """
        timeout_s = takes_s + (ANSWER_S if self._has_answered else FIRST_ANSWER_S)
        async with _answered_within(timeout_s):
            try:
                answer = await getattr(self._actor, method).remote(*args)
            except ray.exceptions.ActorDiedError:
                self._actor, self._has_answered = get_directory(self._app), False
                raise
            except ray.exceptions.ActorUnavailableError:
                answer = await _call_by_proxy.remote(self._app, timeout_s, method, args)
        self._has_answered = True
        return answer


def call_directory(app: str, timeout_s: float, method: str, args: tuple[Any, ...]) -> Any:
    """Look up the directory and call it. For a short-lived process, which cannot have missed the actor's restart."""
    directory = ray.get_actor(directory_name(app), NAMESPACE)
    return ray.get(getattr(directory, method).remote(*args), timeout=timeout_s)


_call_by_proxy = ray.remote(num_cpus=0, max_retries=0, max_calls=MAX_PROXY_CALLS, scheduling_strategy="DEFAULT")(
    call_directory
)


@contextlib.asynccontextmanager
async def _answered_within(timeout_s: float) -> AsyncIterator[None]:
    """Limit the time of the block. Raises `GetTimeoutError` if it takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        if isinstance(error, ray.exceptions.RayError):
            raise
        raise ray.exceptions.GetTimeoutError(f"the directory was silent for {timeout_s:g} s") from None


@contextlib.asynccontextmanager
async def keep_app_alive(
    directory: DirectoryClient, describe: Callable[[], StartingGroup] | None = None
) -> AsyncIterator[None]:
    """Keep the directory alive while a member starts, which takes minutes for a large model.

    Otherwise the directory could take the application for gone, and its successor would have another cluster key.
    `describe` says what a group is doing meanwhile, for `baton status`.
    """

    async def send() -> None:
        while True:
            with contextlib.suppress(ray.exceptions.RayError):  # registering would raise it, too
                await directory.call("application_lives", *(() if describe is None else (describe(),)))
            await asyncio.sleep(KEEP_ALIVE_S)

    task = asyncio.create_task(send())
    try:
        yield
    finally:
        task.cancel()


async def stay_registered(
    directory: DirectoryClient,
    name: str,
    epoch: int | None,
    register: Callable[[], Awaitable[Any]],
    on_reply: Callable[[HeartbeatReply], None] = lambda _: None,
) -> None:
    """Register, send a heartbeat every second, and register again when the directory has forgotten the member."""
    known = False
    while True:
        try:
            if not known:
                await register()
            reply: HeartbeatReply = await directory.call("heartbeat", name, epoch)
            known = reply is not HeartbeatReply.UNKNOWN
            on_reply(reply)
        except ray.exceptions.RayError as error:
            logger.warning("the directory does not answer %s, trying again: %s", name, type(error).__name__)
            known = False
        await asyncio.sleep(HEARTBEAT_S if known else HEARTBEAT_S / 5)


class HeartbeatThread:
    """Keeps a member registered from a thread with its own event loop, since the member's may be busy with requests."""

    def __init__(self, app: str, name: str, register: Callable[[DirectoryClient], Awaitable[Any]]) -> None:
        """`register` is called with this thread's client of the directory."""
        self._app, self._name, self._register = app, name, register
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="baton-heartbeat", daemon=True)
        self._failure: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Check that the thread is alive. Raises `RuntimeError` with the error that ended it."""
        if self._failure is not None:
            raise RuntimeError(f"{self._name} sends no heartbeats any more: {self._failure}") from self._failure

    async def close(self) -> None:
        """Return when no more heartbeat will be sent. Closing twice is allowed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end.set)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._beat())
        except Exception as error:
            logger.exception("the heartbeats of %s ended", self._name)
            self._failure = error
        finally:
            self._loop.close()

    async def _beat(self) -> None:
        directory = DirectoryClient(self._app)
        beating = asyncio.create_task(stay_registered(directory, self._name, None, lambda: self._register(directory)))
        ending = asyncio.create_task(self._end.wait())
        await asyncio.wait({beating, ending}, return_when=asyncio.FIRST_COMPLETED)
        if beating.done():
            await beating
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
