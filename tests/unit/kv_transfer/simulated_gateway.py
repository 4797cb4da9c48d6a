"""The gateway of the simulation: it carries tickets, and does to engines what gateways do to them.

One request at a time has at most one prefill and one decode attempt. Whatever is given up is told to the engines; a
request that lost an attempt is submitted anew, elsewhere or to the same engines, under the same name and the next
generation.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from baton.kv_transfer.protocol.messages import EngineKey

from .simulated_engine import Engine, Offering, require

if TYPE_CHECKING:
    from .simulation import World


@dataclasses.dataclass
class Job:
    request_id: str
    num_blocks: int
    cached_blocks: int
    num_written: int  # when it is offered
    replaces: bool = False  # its last block is known only when it is written
    generation: int = 0
    prefill: EngineKey | None = None
    decode: tuple[EngineKey, int] | None = None  # with the receive


class Gateway:
    def __init__(self, world: World) -> None:
        self.world = world
        self.jobs: dict[str, Job] = {}
        self.tickets: list[Offering] = []  # all that were ever carried
        self._num_jobs = 0
        self._attempts: dict[tuple[EngineKey, int], str] = {}  # whose every receive is that was ever begun
        self._answered: set[str] = set()

    def submit(
        self,
        prefill: str,
        decode: str,
        num_blocks: int,
        cached_blocks: int,
        num_written: int,
        *,
        replaces: bool = False,
    ) -> None:
        self._num_jobs += 1
        request_id = f"request-{self._num_jobs}"
        job = Job(request_id, num_blocks, cached_blocks, min(num_written, num_blocks), replaces)
        self.jobs[job.request_id] = job
        self._try(job, prefill, decode)

    def resubmit(self, which: int, prefill: str, decode: str) -> None:
        """Gives up an attempt and begins another: elsewhere, or at the same engines."""
        job = self._pick(which)
        if job is not None:
            self._give_up(job)
            job.generation += 1
            self._try(job, prefill, decode)

    def abort(self, which: int) -> None:
        """The client left: every attempt is told."""
        job = self._pick(which)
        if job is not None:
            self._give_up(job)
            del self.jobs[job.request_id]

    def replay(self, decode: str, which: int) -> None:
        """A ticket comes to a decode engine that was used before, there or elsewhere."""
        if self.tickets:
            self.world.engines[decode].receive(self.tickets[which % len(self.tickets)], 0)

    def on_received(self, engine: Engine, receive: int) -> None:
        request_id = self._attempts.get((engine.key, receive))
        if request_id is not None:  # a ticket that was replayed is nobody's
            require(request_id not in self._answered, f"{request_id} is answered twice")
            self._answered.add(request_id)
            self.jobs.pop(request_id, None)

    def on_failed(self, engine: Engine, receive: int) -> None:
        """The other attempt is told at once; a new attempt is up to `resubmit`."""
        job = self._job_of(engine, receive)
        if job is not None:
            job.decode = None
            self._give_up(job)

    def _try(self, job: Job, prefill: str, decode: str) -> None:
        engine = self.world.engines[prefill]
        offering = engine.offer(job.num_blocks, job.num_written, job.request_id, job.generation, replaces=job.replaces)
        if offering is None:
            return
        self.tickets.append(offering)
        job.prefill = engine.key
        generation = job.generation
        delay_s = self.world.rng.choice((0.0, 0.0, 0.5, 4.0))
        self.world.clock.after(delay_s, lambda: self._carry(job, generation, offering, decode))

    def _carry(self, job: Job, generation: int, offering: Offering, decode: str) -> None:
        """The ticket of an attempt that was given up is dropped here."""
        if self.jobs.get(job.request_id) is not job or job.generation != generation or job.prefill is None:
            return
        engine = self.world.engines[decode]
        receive = engine.receive(offering, job.cached_blocks)
        if receive is not None:
            self._attempts[engine.key, receive] = job.request_id
        if receive is not None and receive in engine.receives:  # it may have failed at once
            job.decode = engine.key, receive

    def _give_up(self, job: Job) -> None:
        prefill, job.prefill = self._alive(job.prefill), None
        if prefill is not None:
            prefill.withdraw_request(job.request_id, job.generation)
        if job.decode is not None:
            key, receive = job.decode
            job.decode = None
            decode = self._alive(key)
            if decode is not None and receive in decode.receives:
                decode.cancel(receive)

    def _alive(self, key: EngineKey | None) -> Engine | None:
        engine = self.world.engines.get(key.engine_id) if key is not None else None
        return engine if engine is not None and engine.key == key else None

    def _job_of(self, engine: Engine, receive: int) -> Job | None:
        return next((job for job in self.jobs.values() if job.decode == (engine.key, receive)), None)

    def _pick(self, which: int) -> Job | None:
        return list(self.jobs.values())[which % len(self.jobs)] if self.jobs else None
