"""Requests to `baton serve` with one prefill and one decode engine."""

from __future__ import annotations

import asyncio

import openai

ROLES = ["decode", "prefill"]
STREAMS = 32


def prompt_of(number: int) -> str:
    """Make a prompt of 20 to 300 tokens, none a prefix of another."""
    return f"# {number}\n" + "def fox(lazy, dog):\n    return lazy + dog\n" * (1 + number % 16)


async def answer_to(
    client: openai.AsyncOpenAI, number: int, max_tokens: int, begun: asyncio.Queue[int] | None = None
) -> str:
    """Return the streamed text of a greedy answer. Puts `number` into `begun` when the first piece arrives."""
    stream = await client.completions.create(
        model="baton-demo",
        prompt=prompt_of(number),
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    texts: list[str] = []
    async for event in stream:
        if begun is not None and not texts:
            begun.put_nowait(number)
        texts += [choice.text for choice in event.choices]
    return "".join(texts)


async def answers(client: openai.AsyncOpenAI, count: int, max_tokens: int) -> list[str]:
    return list(await asyncio.gather(*(answer_to(client, number, max_tokens) for number in range(count))))


async def keep_asking(client: openai.AsyncOpenAI, number: int, stop: asyncio.Event) -> list[str | openai.APIError]:
    """Send the same request again and again until `stop` is set; at least once."""
    results: list[str | openai.APIError] = []
    while not results or not stop.is_set():
        try:
            results.append(await answer_to(client, number, 60))
        except openai.APIError as error:
            results.append(error)
            await asyncio.sleep(0.2)
    return results
