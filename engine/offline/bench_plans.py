"""Measures how long a plan takes from the rank that schedules to a rank that follows, on this machine.

    python -m baton.engine.offline.bench_plans [--requests N] [--steps N] [--every-ms MS]

It uses two processes and the sockets of `plans`. The time ends when the second process has decoded the plan.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from ..core.step import Chunk, StepPlan
from ..parallel.groups import ALL_ALONE
from ..parallel.member import Member
from ..parallel.plans import PlanReceiver, PlanSender
from ..parallel.rendezvous import Rendezvous, RendezvousClient

BLOCK_TOKENS = 16  # steps from one new block of a request to the next
CONTEXT_TOKENS = 1000
WARM_UP_STEPS = 100
START_TIMEOUT_S = 60.0


def decode_plan(step: int, num_requests: int) -> StepPlan:
    """Return a plan in which every request decodes a token, and every 16th gets a new block."""
    chunks = [
        Chunk(row, CONTEXT_TOKENS + step, 1, True, [[step + row]] if (step + row) % BLOCK_TOKENS == 0 else [])
        for row in range(num_requests)
    ]
    return StepPlan(step, [], [], chunks)


def measure(num_requests: int, num_steps: int, every_s: float) -> list[float]:
    """Return the seconds that each plan takes."""
    rendezvous = Rendezvous()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    follower = context.Process(target=_follow, args=(_member(1, rendezvous.address), theirs), daemon=True)
    follower.start()
    theirs.close()
    sender = PlanSender(*_joined(_member(0, rendezvous.address)), ALL_ALONE)
    sent = []
    for step in range(WARM_UP_STEPS + num_steps):
        plan = decode_plan(step, num_requests)
        sent.append(time.monotonic())
        sender.send(plan)
        time.sleep(every_s)
    sender.close()
    received: list[float] = ours.recv()
    follower.join()
    return [end - begin for begin, end in zip(sent, received, strict=True)][WARM_UP_STEPS:]


def _follow(member: Member, pipe: Connection) -> None:
    """Send the arrival time of each plan through the pipe, by the clock that all processes of a machine share."""
    receiver, received = PlanReceiver(*_joined(member), ALL_ALONE), []
    while receiver.receive() is not None:
        received.append(time.monotonic())
    receiver.close()
    pipe.send(received)


def _member(rank: int, rendezvous: str) -> Member:
    return Member(rank=rank, tensor_parallel_size=2, rendezvous=rendezvous, start_timeout_s=START_TIMEOUT_S)


def _joined(member: Member) -> tuple[Member, RendezvousClient]:
    rendezvous = RendezvousClient(member.rendezvous, member.rank, timeout_s=START_TIMEOUT_S)
    rendezvous.put(f"here/{member.rank}", member.host)
    return member, rendezvous


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m baton.engine.offline.bench_plans", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--requests", type=int, default=64, help="that decode in each step")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every-ms", type=float, default=5.0, help="pause from plan to plan: 0 for as fast as may be")
    given = parser.parse_args(arguments)
    if given.requests < 1 or given.steps < 2 or given.every_ms < 0:
        parser.error("--requests is at least 1, --steps at least 2, --every-ms at least 0")
    num_bytes = len(msgspec.msgpack.encode(decode_plan(0, given.requests)))
    seconds = measure(given.requests, given.steps, given.every_ms / 1e3)
    *_, p99 = statistics.quantiles(seconds, n=100)
    print(
        f"{num_bytes} bytes: median {statistics.median(seconds) * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us, of {given.steps}"
    )


if __name__ == "__main__":
    main()
