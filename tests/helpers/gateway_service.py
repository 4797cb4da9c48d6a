"""A gateway with its engines, and the operations that tests perform on it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import uvicorn
from fastapi import FastAPI

from baton.cluster.gateway.api.body_service import BodyService
from baton.cluster.ingress.http_protocol import GuardedHttpProtocol
from baton.engine.text import Tokenizer

from .fake_cluster import FakeCluster

HANGS_AFTER_S = 100.0  # a limit for what would never end; everything else may take its time on a busy machine


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Service:
    """One gateway and its engines."""

    def __init__(self, cluster: FakeCluster, app: FastAPI, tokenizer: Tokenizer, bodies: BodyService) -> None:
        self.cluster = cluster
        self.app = app
        self.bodies = bodies
        self.tokenizer = tokenizer
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=HANGS_AFTER_S)

    def script(self, prompt: str, answer: str | list[int], *, end: bool = True) -> None:
        """Answer this prompt with `answer` from now on: its tokens, then end-of-sequence."""
        tokens = self.tokenizer.encode(answer) if isinstance(answer, str) else list(answer)
        ending = [self.tokenizer.eos_token_id] if end else []
        self.cluster.scripts[tuple(self.tokenizer.encode(prompt))] = tokens + ending

    def script_chat(self, message: str, answer: str | list[int]) -> None:
        self.script(f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n", answer)

    async def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **fields})

    async def chat(self, message: str, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": message}]
        return await self.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields})

    @asynccontextmanager
    async def over_tcp(self) -> AsyncIterator[str]:
        """Serve over TCP in this event loop, and give the base URL."""
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            self.app, http=GuardedHttpProtocol, lifespan="off", log_level="warning", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(HANGS_AFTER_S):
                while not server.started:
                    await asyncio.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, HANGS_AFTER_S)

    @asynccontextmanager
    async def openai(self, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        async with (
            self.over_tcp() as url,
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANGS_AFTER_S, **options
            ) as client,
        ):
            yield client

    async def metrics(self) -> dict[str, float]:
        """Return the metrics as a dict from sample name with labels to value."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in samples}


def events(body: str) -> list[Any]:
    """Return the payloads of a stream of server-sent events; `[DONE]` unchanged."""
    assert body.endswith("\n\n")
    payloads = [event.removeprefix("data: ") for event in body.split("\n\n")[:-1]]
    assert all("\n" not in payload for payload in payloads)
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(HANGS_AFTER_S):
        while not condition():
            await asyncio.sleep(0.001)


def check_refused(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> str:
    """Check that the error has OpenAI's shape and these fields. Returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert error["message"]
    return error["message"]
