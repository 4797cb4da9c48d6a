"""The recall test of a server: asks for single values out of long lists, and counts the correct answers.

     qk dt mp rd          a key, then its value: two syllables out of 256 each
     bs kc gs fd          (a syllable is one token, so a pair is five tokens)
    ? bs kc gs fd

An answer is a copy of two tokens from an exact place in the context. The demo model answers at least 99 of 100
correctly at every length up to 2 000 tokens. So wrong answers point at the server: at KV blocks that were lost, stale
or misplaced on their way from prefill to decode. Any OpenAI-compatible server can be tested.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.progress import Progress

TIMEOUT_S = 300.0

CONSONANTS = "bcdfghjklmnpqrst"
SYLLABLES = [f" {first}{second}" for first in CONSONANTS for second in CONSONANTS]
TOKENS_PER_PAIR = 5  # two of the key, two of the value, newline
TOKENS_PER_QUESTION = 3  # "?", two of the key
TOKENS_PER_ANSWER = 2
MOST_TOKENS = TOKENS_PER_QUESTION + TOKENS_PER_PAIR * len(SYLLABLES) ** 2  # a list that has every key


@dataclass(frozen=True)
class Question:
    length: int  # approximate number of the prompt's tokens
    prompt: str
    answer: str


@dataclass
class RecallTally:
    """Counts of the answers to the questions of one length."""

    asked: int = 0
    right: int = 0
    errors: int = 0
    prompt_tokens: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        mean = sum(self.prompt_tokens) / len(self.prompt_tokens) if self.prompt_tokens else 0.0
        accuracy = self.right / self.asked if self.asked else 0.0
        return {"accuracy": accuracy, "asked": self.asked, "errors": self.errors, "mean_prompt_tokens": round(mean, 1)}


@dataclass(frozen=True)
class RecallServer:
    """The server under test. `api` is `completions` (the plain text) or `chat` (the text as one user message)."""

    base_url: str
    model: str
    api_key: str | None
    api: str

    async def ask(self, client: httpx.AsyncClient, question: Question) -> tuple[str, int, str]:
        """Return the answer's text, the prompt's tokens, and the server's x-baton-path. Raises `httpx.HTTPError`."""
        body: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": TOKENS_PER_ANSWER}
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": question.prompt}]
            response = await client.post("/v1/chat/completions", json=body)
        else:
            response = await client.post("/v1/completions", json=body | {"prompt": question.prompt})
        answer = response.raise_for_status().json()
        choice = answer["choices"][0]
        text = choice["message"]["content"] if self.api == "chat" else choice["text"]
        return text, answer["usage"]["prompt_tokens"], response.headers.get("x-baton-path", "")


def make_questions(lengths: Sequence[int], samples: int, seed: int) -> list[Question]:
    """Make `samples` questions of each length, in random order. The same seed gives the same questions."""
    rng = random.Random(seed)
    questions = [Question(n, *make_question(rng, n)) for n in lengths for _ in range(samples)]
    rng.shuffle(questions)
    return questions


async def evaluate(
    server: RecallServer, questions: Sequence[Question], concurrency: int, progress: Progress
) -> dict[str, Any]:
    """Ask all questions, `concurrency` at a time. A failed request counts as an error and as a wrong answer."""
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    tallies = {question.length: RecallTally() for question in sorted(questions, key=lambda q: q.length)}
    paths: Counter[str] = Counter()
    bar = progress.add_task("asking", total=len(questions))
    gate = asyncio.Semaphore(concurrency)
    base_url = server.base_url.rstrip("/").removesuffix("/v1")

    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=TIMEOUT_S) as client:

        async def ask(question: Question) -> None:
            tally = tallies[question.length]
            async with gate:
                try:
                    text, prompt_tokens, path = await server.ask(client, question)
                except httpx.HTTPError as error:
                    tally.errors += 1
                    said = error.response.text if isinstance(error, httpx.HTTPStatusError) else repr(error)
                    progress.console.print(f"{question.length} tokens: {said}", style="red", markup=False)
                else:
                    tally.right += text.split() == question.answer.split()
                    tally.prompt_tokens.append(prompt_tokens)
                    paths[path] += 1
            tally.asked += 1
            progress.advance(bar)

        await asyncio.gather(*(ask(question) for question in questions))
    asked = sum(tally.asked for tally in tallies.values())
    return {
        "accuracy": sum(tally.right for tally in tallies.values()) / asked,
        "asked": asked,
        "errors": sum(tally.errors for tally in tallies.values()),
        "by_length": {str(length): tally.summary() for length, tally in tallies.items()},
        "paths": dict(paths),
        "model": server.model,
        "api": server.api,
    }


def make_pair(rng: random.Random) -> tuple[str, str]:
    """Draw a key and a value as they appear in the text, each with a leading space."""
    return (rng.choice(SYLLABLES) + rng.choice(SYLLABLES), rng.choice(SYLLABLES) + rng.choice(SYLLABLES))


def make_question(rng: random.Random, num_tokens: int) -> tuple[str, str]:
    """Make a prompt of about `num_tokens` tokens (one pair at least, `MOST_TOKENS` at most), and its correct answer."""
    pairs: dict[str, str] = {}
    wanted = max(1, (num_tokens - TOKENS_PER_QUESTION) // TOKENS_PER_PAIR)
    while len(pairs) < wanted:
        key, value = make_pair(rng)
        pairs[key] = value
    asked = rng.choice(list(pairs))
    lines = "".join(f"{key}{value}\n" for key, value in pairs.items())
    return f"{lines}?{asked}", pairs[asked]
