"""`baton status`, for people and for programs, with a gateway that answers and without one."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Callable

import pytest

from baton.cluster.contracts import Role

from ...helpers.baton_command import run_baton
from ...helpers.free_ports import free_port
from ...helpers.gateway_service import Service


async def status(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_baton, "status", "--url", url, *words)


async def test_json_output_has_the_gateways_table_and_its_readiness(service: Service) -> None:
    async with service.over_tcp() as url:
        done = await status(url, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told.pop("ready") is True
    assert told == (await service.http.get("/v1/cluster/ranks")).json()


async def test_without_a_serving_path_the_exit_code_is_an_error_and_the_output_lists_engines(
    start: Callable[..., Service],
) -> None:
    service = start(Role.PREFILL)
    async with service.over_tcp() as url:
        shown, told = await status(url), await status(url, "--json")
    assert (shown.returncode, told.returncode) == (1, 1)
    assert "not ready" in shown.stdout
    answer = json.loads(told.stdout)
    assert answer["ready"] is False
    assert [rank["role"] for rank in answer["data"]] == ["prefill"]


async def test_without_a_gateway_the_json_output_is_empty(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, api_keys=["secret"])
    async with service.over_tcp() as url:
        refused = await status(url, "--json")
        taken = await status(url, "--json", "--api-key", "secret")
    gone = await status(url, "--json")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "give a key that it takes as --api-key" in refused.stderr
    assert (gone.returncode, gone.stdout) == (1, "")
    assert f"no answer from {url}" in gone.stderr
    assert taken.returncode == 0
    assert "secret" not in taken.stdout


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("status", "{}/v1/cluster/ranks answers, but not as Baton does"),
        ("top", "{}/v1/cluster/ranks answers, but not as Baton does"),
        ("chat", "{}/v1/models answers, but not as Baton does"),
        ("eval recall", "{}/v1/models answers, but not as Baton does"),
        ("bench serve", "{} answers, but not as OpenAI's API says"),
    ],
)
async def test_a_server_that_is_no_gateway_is_an_error(command: str, said: str) -> None:
    async def say_something_else(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\nconnection: close\r\n\r\n<html/>")
        writer.close()

    async with await asyncio.start_server(say_something_else, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        done = await asyncio.to_thread(run_baton, *command.split(), "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"error: {said.format(url)}" in done.stderr


async def test_a_server_without_the_route_is_an_error() -> None:
    async def find_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(find_nothing, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        done = await asyncio.to_thread(run_baton, "bench", "serve", "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"error: {url}/v1/models answers with 404, not as OpenAI's API says" in done.stderr


@pytest.mark.parametrize("command", ["eval recall --samples 1 --lengths 64", "bench serve --num-prompts 1"])
async def test_a_refusal_is_shown_as_the_server_words_it(service: Service, command: str) -> None:
    async with service.over_tcp() as url:
        done = await asyncio.to_thread(run_baton, *command.split(), "--url", url, "--model", "another")
    assert "The model 'another' does not exist" in done.stderr


@pytest.mark.parametrize("command", ["status", "top", "chat", "eval recall", "bench serve"])
def test_where_no_server_is_every_command_says_so(command: str) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = run_baton(*command.split(), "--url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(rf"error: no answer from {url} \(.*\); is `baton serve` running there\?\n$", done.stderr)


def test_lists_longer_than_the_keys_allow_are_refused() -> None:
    done = run_baton("eval", "recall", "--lengths", "64,400000")
    assert done.returncode == 2
    assert "--lengths 400000: give 327683 at most" in done.stderr
