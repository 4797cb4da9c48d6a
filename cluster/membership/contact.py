"""How engines and gateways reach the directory: their calls, and what keeps them listed.

    HeartbeatThread ─┐
    stay_registered ─┴ register, heartbeat ──┐
    presence ────────── application_lives ───┼──> DirectoryWatch ──> directory
    snapshots <──────── watch ───────────────┘         └── where it is out of this process's reach: by another process

Every call has an end: Ray waits for ever for an answer that was lost with a link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import ray

from baton.cluster.contracts import DirectorySnapshot

from .directory import HEARTBEAT_S, NAMESPACE, WATCH_S, directory_name, get_directory
from .members import Standing

logger = logging.getLogger(__name__)

ANSWER_S = 10.0  # a call is answered sooner ...
FIRST_ANSWER_S = 60.0  # ... but for the first one: the directory may be starting
ASKED_ELSEWHERE = 20  # calls that one other process makes for those that cannot reach the directory
PRESENCE_S = 5.0  # between signs of life of a member that is not ready yet


class DirectoryWatch:
    """The directory as a `SnapshotSource` of a client. Finds the actor anew where it is gone for good."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._actor = get_directory(app)
        self._has_answered = False

    async def watch(self, version: int) -> DirectorySnapshot:
        """See `Directory.watch`. Raises as `call`."""
        snapshot: DirectorySnapshot = await self._ask(WATCH_S, "watch", version)
        return snapshot

    async def call(self, method: str, *args: Any) -> Any:
        """Calls the actor. Raises what Ray raises, `GetTimeoutError` where no answer comes.

        Where the actor is dead, the next call finds its successor.
        """
        return await self._ask(0.0, method, *args)

    async def _ask(self, takes_s: float, method: str, *args: Any) -> Any:
        """`takes_s`: for which the directory may think about it.

        Ray tells a process once where an actor that was restarted is now. One that was cut off may miss it, and would
        never hear of it again: where the actor is out of its reach, another process asks.
        """
        timeout_s = takes_s + (ANSWER_S if self._has_answered else FIRST_ANSWER_S)
        async with _answered_within(timeout_s):
            try:
                answer = await getattr(self._actor, method).remote(*args)
            except ray.exceptions.ActorDiedError:
                self._actor, self._has_answered = get_directory(self._app), False
                raise
            except ray.exceptions.ActorUnavailableError:
                answer = await _ask_elsewhere.remote(self._app, timeout_s, method, args)
        self._has_answered = True
        return answer


@ray.remote(num_cpus=0, max_retries=0, max_calls=ASKED_ELSEWHERE, scheduling_strategy="DEFAULT")
def _ask_elsewhere(app: str, timeout_s: float, method: str, args: tuple[Any, ...]) -> Any:
    """In a process that has its own word of where the directory is, and a short life: it could be cut off, too."""
    directory = ray.get_actor(directory_name(app), NAMESPACE)
    return ray.get(getattr(directory, method).remote(*args), timeout=timeout_s)


@contextlib.asynccontextmanager
async def _answered_within(timeout_s: float) -> AsyncIterator[None]:
    """Raises `GetTimeoutError` where that takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        if isinstance(error, ray.exceptions.RayError):
            raise
        raise ray.exceptions.GetTimeoutError(f"the directory was silent for {timeout_s:g} s") from None


@contextlib.asynccontextmanager
async def presence(directory: DirectoryWatch) -> AsyncIterator[None]:
    """Around a member's start, which takes minutes where its model is large: the directory must not take the
    application for gone meanwhile, since its successor would have another cluster key.
    """

    async def say_so() -> None:
        while True:
            with contextlib.suppress(ray.exceptions.RayError):  # registering will say what is wrong
                await directory.call("application_lives")
            await asyncio.sleep(PRESENCE_S)

    task = asyncio.create_task(say_so())
    try:
        yield
    finally:
        task.cancel()


async def stay_registered(
    directory: DirectoryWatch,
    name: str,
    epoch: int | None,
    register: Callable[[], Awaitable[Any]],
    on_standing: Callable[[Standing], None] = lambda _: None,
) -> None:
    """Registers, sends a heartbeat every second, and registers again when the directory has forgotten the member."""
    known = False
    while True:
        try:
            if not known:
                await register()
            standing: Standing = await directory.call("heartbeat", name, epoch)
            known = standing is not Standing.UNKNOWN
            on_standing(standing)
        except ray.exceptions.RayError as error:
            logger.warning("the directory does not answer %s, trying again: %s", name, type(error).__name__)
            known = False
        await asyncio.sleep(HEARTBEAT_S if known else HEARTBEAT_S / 5)


class HeartbeatThread:
    """Keeps a member registered from a thread with an event loop of its own: the member's may be busy with requests."""

    def __init__(self, app: str, name: str, register: Callable[[DirectoryWatch], Awaitable[Any]]) -> None:
        """`register` is given the directory as this thread reaches it."""
        self._app, self._name, self._register = app, name, register
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="baton-heartbeat", daemon=True)
        self._failure: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raises what ended the thread by itself: the directory will take the member for gone."""
        if self._failure is not None:
            raise RuntimeError(f"{self._name} sends no heartbeats any more: {self._failure}") from self._failure

    async def close(self) -> None:
        """Return when no heartbeat will be sent any more. Closing twice changes nothing."""
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
        directory = DirectoryWatch(self._app)
        beating = asyncio.create_task(stay_registered(directory, self._name, None, lambda: self._register(directory)))
        ending = asyncio.create_task(self._end.wait())
        await asyncio.wait({beating, ending}, return_when=asyncio.FIRST_COMPLETED)
        if beating.done():
            await beating
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
