"""Streams that continuously ask questions with known answers, and record the fate of every request."""

from __future__ import annotations

import asyncio
import enum
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from baton.cluster.recall import Question, make_questions

from ..helpers.resumable_stream import Refused, ResumableStream

LENGTHS = (64, 256, 700, 1500)  # tokens of a prompt, about
MODEL = "baton-demo"
TOKENS = 48  # of an answer: the requested value, and more
PAUSE_S = 0.3  # before a stream asks again after a refusal
CONNECT_S = 5.0


class Fate(enum.StrEnum):
    """The end of a request."""

    RIGHT = "right"
    WRONG = "wrong"  # other text than without faults
    REFUSED = "refused"  # no connection, or an error before the first token: the client loses nothing by asking again
    LOST = "lost"  # ended after its first token, neither whole nor resumable
    HUNG = "hung"  # still open at the deadline


@dataclass(frozen=True)
class Answer:
    """A request's text, or its failure."""

    fate: Fate
    detail: str
    pause_s: float = 0.0  # the longest time that the client waited for the next piece
    resumed: bool = False  # its gateway died, and another one continued it


@dataclass(frozen=True)
class Asked:
    number: int  # of the question
    answer: Answer
    started_s: float
    ended_s: float

    @property
    def fate(self) -> Fate:
        return self.answer.fate


@dataclass(frozen=True)
class Answerer:
    """Sends questions to one address. A request may be open for at most `deadline_s`."""

    url: str
    deadline_s: float

    async def ask(self, http: httpx.AsyncClient, question: Question, expected: str | None) -> Answer:
        """Ask a question. Without `expected`, any whole text is right."""
        body = {"model": MODEL, "prompt": question.prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        stream = ResumableStream(http, f"{self.url}/v1/completions", body)
        pauses = _Pauses()
        fate, detail = await self._fate(stream, expected, pauses)
        pauses.end()
        return Answer(fate, detail, pauses.longest_s, stream.num_resumed > 0)

    async def _fate(self, stream: ResumableStream, expected: str | None, pauses: _Pauses) -> tuple[Fate, str]:
        """Return a stream's fate, and its text or the reason."""
        parts: list[str] = []
        try:
            async with asyncio.timeout(self.deadline_s), aclosing(stream.events()) as events:
                async for event in events:
                    pauses.end()
                    parts += [choice["text"] for choice in event["choices"]]
        except TimeoutError:
            return Fate.HUNG, f"open after {self.deadline_s:.0f} s"
        except (httpx.HTTPError, Refused) as error:
            return Fate.LOST if parts else Fate.REFUSED, repr(error)
        text = "".join(parts)
        return (Fate.RIGHT if expected in (None, text) else Fate.WRONG), text


class _Pauses:
    """The times for which one client waits for the next piece, beginning with the request."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.longest_s = 0.0

    def end(self) -> None:
        """Note that a piece has come; the wait for the next one begins."""
        now_s = time.monotonic()
        self.longest_s, self._began_s = max(self.longest_s, now_s - self._began_s), now_s


class Quiz:
    """Questions with the answers given without faults. `learn` gets those from the server, one question a stream.

    The prompts' lists say whether those answers are right.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.questions: Sequence[Question] = make_questions(LENGTHS, -(-count // len(LENGTHS)), seed)
        self.expected: list[str] = []

    def learn(self, answerer: Answerer, streams: int) -> float:
        """Ask all questions; return the share of right answers. Raises `RuntimeError` if a request fails."""

        async def ask_all() -> list[Answer]:
            gate = asyncio.Semaphore(streams)
            async with _client() as http:

                async def ask(question: Question) -> Answer:
                    async with gate:
                        return await answerer.ask(http, question, None)

                return list(await asyncio.gather(*map(ask, self.questions)))

        answers = asyncio.run(ask_all())
        if bad := [answer for answer in answers if answer.fate is not Fate.RIGHT]:
            raise RuntimeError(f"an undisturbed server does not answer: {bad[:3]}")
        self.expected = [answer.detail for answer in answers]
        pairs = zip(self.questions, self.expected, strict=True)
        return sum(text.startswith(question.answer) for question, text in pairs) / len(self.expected)


class Load:
    """A context in which `streams` clients ask random questions of `quiz`, each one as soon as the last is answered."""

    def __init__(self, answerer: Answerer, quiz: Quiz, *, streams: int, seed: int) -> None:
        self._answerer, self._quiz, self._streams, self._seed = answerer, quiz, streams, seed
        self._stop = threading.Event()
        self._died: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load")
        self.asked: list[Asked] = []  # only ever appended to

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop asking; return when every open request has ended. Raises the load's own errors."""
        self._stop.set()
        self._thread.join()
        if self._died is not None:
            raise self._died

    def counts(self) -> Counter[Fate]:
        return Counter(asked.fate for asked in self.asked)

    def of_fate(self, *fates: Fate) -> list[Asked]:
        return [asked for asked in self.asked if asked.fate in fates]

    def _run(self) -> None:
        try:
            asyncio.run(self._ask_on())
        except BaseException as error:
            self._died = error

    async def _ask_on(self) -> None:
        async with _client() as http:
            rngs = [random.Random(f"{self._seed}/{number}") for number in range(self._streams)]
            await asyncio.gather(*(self._one_stream(http, rng) for rng in rngs))

    async def _one_stream(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._stop.is_set():
            number = rng.randrange(len(self._quiz.questions))
            started_s = time.monotonic()
            answer = await self._answerer.ask(http, self._quiz.questions[number], self._quiz.expected[number])
            self.asked.append(Asked(number, answer, started_s, time.monotonic()))
            if answer.fate is Fate.REFUSED:
                await asyncio.sleep(PAUSE_S)


def _client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a broken connection affects one request
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_S), limits=limits)
