"""`baton serve` with one prefill and one decode engine, one for each module, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from ..helpers.free_ports import free_port
from ..helpers.served import Server, baton_serve, config_file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    config = config_file(tmp_path_factory.mktemp("config"), name="main", port=port)
    with baton_serve(config, port) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0)
