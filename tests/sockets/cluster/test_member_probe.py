"""Busy, stopped and dead members: which ones stay listed, and how the directory finds out."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from baton.cluster.contracts import EngineGroup
from baton.cluster.membership.member_probe import (
    BUSY_S,
    MISSED_AFTER_S,
    SUSPECT_AFTER_S,
    TRUSTED_S,
    ProbeSocket,
    ProcessState,
    probe,
    probe_all,
)
from baton.cluster.membership.members import HeartbeatReply, Membership

from ...helpers.fakes import make_gateway, make_record

pytestmark = pytest.mark.timeout(60)

PATIENT_S = 20.0  # for the answer of a process on a busy machine

# Prints its address; holds Python's GIL forever once it is told to.
MEMBER = """
import ctypes, sys
from baton.cluster.membership.member_probe import ProbeSocket
life = ProbeSocket("127.0.0.1")
print(life.address, flush=True)
sys.stdin.readline()
print("busy", flush=True)
ctypes.PyDLL(None).sleep(3600)
"""


class Process:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def hold_the_lock(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self._line() == "busy"

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def member() -> Iterator[Process]:
    process = Process()
    yield process
    process.kill()


async def test_a_process_that_holds_pythons_lock_answers(member: Process) -> None:
    member.hold_the_lock()
    assert await probe(member.address, PATIENT_S) is ProcessState.RUNS


async def test_a_stopped_process_does_not_answer(member: Process) -> None:
    member.stop()
    assert await probe(member.address, 1.0) is ProcessState.STOPPED


async def test_a_dead_process_is_known_for_one(member: Process) -> None:
    member.kill()
    assert await probe(member.address, PATIENT_S) is ProcessState.DEAD


async def test_a_machine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(*_: object) -> None:
        await asyncio.sleep(PATIENT_S)

    monkeypatch.setattr(asyncio, "open_connection", nobody)
    assert await probe("tcp://10.255.255.1:7000", 0.05) is ProcessState.UNREACHABLE


async def test_a_group_answers_where_all_of_its_engines_do(member: Process) -> None:
    other = ProbeSocket("127.0.0.1")
    assert await probe_all([member.address, other.address], PATIENT_S) is ProcessState.RUNS
    member.kill()
    assert await probe_all([member.address, other.address], PATIENT_S) is ProcessState.DEAD
    other.close()


async def test_nobody_is_let_in_where_a_process_only_shows_that_it_lives() -> None:
    life = ProbeSocket("127.0.0.1")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.curve_serverkey = life.public_key  # although it knows the key
    monitor = stranger.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
    )
    stranger.connect(life.address)
    assert await asyncio.to_thread(monitor.poll, PATIENT_S * 1000)
    event = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
    assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
    stranger.disable_monitor()
    monitor.close()
    stranger.close()
    context.term()
    life.close()


async def test_being_asked_leaves_no_descriptor_behind() -> None:
    life = ProbeSocket("127.0.0.1")

    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    await probe(life.address, PATIENT_S)
    before = num_open()
    for _ in range(50):
        assert await probe(life.address, PATIENT_S) is ProcessState.RUNS
    deadline = time.monotonic() + PATIENT_S
    while num_open() > before:  # libzmq's thread closes its sockets in the background
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    life.close()


# ---- effects on the list


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def members(clock: Clock) -> Membership:
    members = Membership(clock, first_version=1)
    members.add_gateway(msgspec.structs.replace(make_gateway("g"), life_address="tcp://127.0.0.1:1"))
    return members


def fall_silent(
    members: Membership, clock: Clock, seconds: float, pulse: Callable[[], ProcessState | None]
) -> list[str]:
    """Let the member be silent for so long, with a check and a probe each second. Return removed members."""
    removed = []
    for _ in range(round(seconds)):
        clock.now_s += 1.0
        found = pulse()
        for name in members.suspects():
            if found is not None:
                members.note_probe(name, found)
        removed += members.remove_silent()
    return removed


def test_a_member_that_answers_is_kept_and_counted_once_a_silence(members: Membership, clock: Clock) -> None:
    assert fall_silent(members, clock, BUSY_S, lambda: ProcessState.RUNS) == []
    assert [gateway.identity for gateway in members.snapshot().gateways] == ["g"]
    assert members.num_kept == 1
    assert members.note_heartbeat("g") is HeartbeatReply.LISTED
    assert fall_silent(members, clock, MISSED_AFTER_S + 1, lambda: ProcessState.RUNS) == []
    assert members.num_kept == 2


def test_a_member_that_answers_and_says_nothing_is_gone_at_last(members: Membership, clock: Clock) -> None:
    assert fall_silent(members, clock, BUSY_S + 1, lambda: ProcessState.RUNS) == ["g (its process runs)"]


@pytest.mark.parametrize("pulse", [ProcessState.STOPPED, ProcessState.DEAD, ProcessState.UNREACHABLE, None])
def test_a_member_that_does_not_answer_is_gone_as_soon_as_if_nobody_asked(
    pulse: ProcessState | None, members: Membership, clock: Clock
) -> None:
    assert fall_silent(members, clock, MISSED_AFTER_S, lambda: pulse) == []
    (gone,) = fall_silent(members, clock, 1.0, lambda: pulse)
    assert gone == ("g" if pulse is None else f"g ({pulse.value})")
    assert members.num_kept == 0


def test_a_member_that_dies_while_it_is_busy_is_gone_soon(members: Membership, clock: Clock) -> None:
    assert fall_silent(members, clock, 15.0, lambda: ProcessState.RUNS) == []
    assert fall_silent(members, clock, TRUSTED_S + 1, lambda: ProcessState.DEAD) == ["g (its process is gone)"]


def test_only_members_whose_heartbeats_are_missing_are_asked(members: Membership, clock: Clock) -> None:
    members.add_group(EngineGroup(group_id="e", first_rank=0, engines=[make_record(engine_id="e")]))
    clock.now_s += SUSPECT_AFTER_S + 0.1
    members.note_heartbeat("g")
    assert members.suspects() == {"e": [make_record(engine_id="e").address]}
    assert not members.note_probe("g", ProcessState.RUNS), "it spoke meanwhile"
    assert not members.note_probe("nobody", ProcessState.RUNS)
