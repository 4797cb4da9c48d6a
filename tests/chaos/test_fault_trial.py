"""The verdict on a fault names its problems: without hosts, against a scripted server."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from . import chaos, fault_trial
from .fault_trial import FaultTrial, Verdict
from .faults import all_faults
from .load import Answerer, Fate, Quiz

PATIENCE_S = 60.0
HANGING_S = 5.0  # the deadline of requests that should exceed it
HEALTHY = Counter({"worker": 4})


@dataclass
class Server:
    """A server that answers every question with the same text, until `fate` says otherwise."""

    fate: Fate = Fate.RIGHT
    url: str = ""
    hurt: threading.Event = field(default_factory=threading.Event)  # set once an answer was not right

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length))
        fate = self.fate
        status = b"503 No" if fate is Fate.REFUSED else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\n\r\n")
        writer.write(event("bad" if fate is Fate.WRONG else "fine"))
        if fate is not Fate.RIGHT:
            self.hurt.set()
        if fate is Fate.HUNG:
            await reader.read()  # until the client gives up
        elif fate is not Fate.LOST:
            writer.write(b"data: [DONE]\n\n")
        writer.close()


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


@pytest.fixture
def server() -> Iterator[Server]:
    server, loop = Server(), asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.answer, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@dataclass
class Application:
    """The part of an application that a trial looks at."""

    url: str
    processes: list[Counter[str]] = field(default_factory=list)  # results of the next counts; after them, all is well
    clean: bool = True

    def census(self) -> Counter[str]:
        return self.processes.pop(0) if self.processes else HEALTHY

    def decisions(self) -> Counter[float]:
        return Counter()

    def is_whole(self) -> bool:
        return True

    def is_clean(self) -> bool:
        return self.clean

    def ranks(self) -> list[Any]:
        return ["prefill of west"]

    def state(self) -> str:
        return "as Serve sees it"


@dataclass
class Trouble:
    """A fault during which the server answers as told."""

    server: Server
    fate: Fate
    name: str = "trouble"
    hides_gateway: bool = False
    hold_s: float = 0.0

    def apply(self, baton: Any) -> None:
        self.server.fate = self.fate
        assert self.fate is Fate.RIGHT or self.server.hurt.wait(PATIENCE_S)

    def heal(self, baton: Any) -> None:
        self.server.fate = Fate.RIGHT


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BEFORE_S": 0.0, "AFTER_S": 0.0, "CLEAN_TIMEOUT_S": 0.2, "STREAMS": 2}.items():
        monkeypatch.setattr(fault_trial, name, value)


def tried(server: Server, application: Application, trouble: Trouble) -> Verdict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_trial, "DEADLINE_S", HANGING_S if trouble.fate is Fate.HUNG else PATIENCE_S)
        quiz = Quiz(seed=1, count=4)
        quiz.learn(Answerer(server.url, PATIENCE_S), streams=4)
        return FaultTrial(application, quiz, seed=1).run(trouble)  # type: ignore[arg-type]  # hosts are not needed


def test_a_fault_that_nobody_notices_has_no_problem(server: Server) -> None:
    verdict = tried(server, Application(server.url), Trouble(server, Fate.RIGHT))
    assert verdict.problems == ()
    assert set(verdict.fates) == {Fate.RIGHT}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fate", [fate for fate in Fate if fate is not Fate.RIGHT])
def test_whatever_becomes_of_a_request_but_a_right_answer_is_a_problem(server: Server, fate: Fate) -> None:
    verdict = tried(server, Application(server.url), Trouble(server, fate))
    assert verdict.fates[fate] > 0
    (problem,) = verdict.problems
    assert f"{verdict.fates[fate]} requests went wrong" in problem


@pytest.mark.parametrize(("fate", "forgiven"), [(Fate.REFUSED, True), (Fate.LOST, False), (Fate.WRONG, False)])
def test_a_gateway_that_is_gone_excuses_what_was_refused_and_nothing_else(
    server: Server, fate: Fate, forgiven: bool
) -> None:
    trouble = Trouble(server, fate, hides_gateway=True)
    verdict = tried(server, Application(server.url), trouble)
    assert verdict.fates[fate] > 0
    assert (verdict.problems == ()) == forgiven


def test_blocks_that_are_stranded_are_a_problem_though_every_answer_was_right(server: Server) -> None:
    verdict = tried(server, Application(server.url, clean=False), Trouble(server, Fate.RIGHT))
    (problem,) = verdict.problems
    assert "stranded: ['prefill of west']" in problem


def test_processes_that_are_left_over_are_a_problem(server: Server) -> None:
    application = Application(server.url, [HEALTHY, HEALTHY, HEALTHY + Counter({"worker": 1})])
    verdict = tried(server, application, Trouble(server, Fate.RIGHT))
    assert verdict.problems == ("processes left over: {'worker': 1}",)


def test_an_application_that_does_not_come_back_ends_the_trial(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_trial, "RECOVERY_TIMEOUT_S", 0.3)
    application = Application(server.url, [HEALTHY, *[Counter[str]()] * 1000])
    with pytest.raises(AssertionError, match=r"missing \{'worker': 4\}"):
        tried(server, application, Trouble(server, Fate.RIGHT))


@pytest.mark.parametrize(("problems", "status"), [((), 0), (("one answer was wrong",), 1)])
def test_the_command_ends_with_what_it_has_found(
    problems: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = Verdict("a", Counter({Fate.RIGHT: 3}), 1.0, 2.0, 3.0, 1.0, 0, Counter(), problems)
    monkeypatch.setattr(chaos, "run", lambda seconds, seed: [verdict])
    monkeypatch.setattr(sys, "argv", ["chaos"])
    with pytest.raises(SystemExit) as ended:
        chaos.main()
    assert ended.value.code == status
    assert capsys.readouterr().out.startswith("chaos: faults=1 requests=3 right=3")


def test_only_what_takes_the_gateway_or_the_way_to_it_excuses_anything() -> None:
    excused = {fault.name for fault in all_faults(seed=1) if fault.hides_gateway}
    assert excused == {"gateway killed", "head restarts", "link of head down for 1 s", "link of head down for 20 s"}
