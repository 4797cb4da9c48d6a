"""`baton serve` with one prefill and one decode engine, and a client of it.

Starting it takes much of a test file's time, so the files of SHARING use one server, one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..helpers.free_ports import free_port
from ..helpers.served import Server, baton_serve, config_file

if TYPE_CHECKING:
    import openai

SHARING = ("test_end_to_end.py", "test_faults_end_to_end.py")


class SharedServer:
    """A server that starts when a test asks for it, and ends before the first file that is not in SHARING."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = contextlib.ExitStack()
        self._server: Server | None = None

    def get(self) -> Server:
        if self._server is None:
            port = free_port()
            config = config_file(self._folder, name="main", port=port)
            self._server = self._running.enter_context(baton_serve(config, port))
        return self._server

    def close(self) -> None:
        self._server = None
        self._running.close()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    shared = SharedServer(tmp_path_factory.mktemp("config"))
    yield shared
    shared.close()


@pytest.fixture(scope="module", autouse=True)
def _one_cluster_at_a_time(request: pytest.FixtureRequest, shared_server: SharedServer) -> None:
    if request.path.name not in SHARING:
        shared_server.close()


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> Server:
    return shared_server.get()


@pytest.fixture
def client(server: Server) -> openai.AsyncOpenAI:
    import openai  # tests of GPUs run without it

    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0)
