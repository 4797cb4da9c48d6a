"""Models by name, fetched from a server with the Hub's API, which may misbehave."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ...helpers.free_ports import free_port
from ...helpers.hub_server import COMMIT, HubServer
from ...helpers.served import eventually
from .hub_client import DEMO, FETCH, INDEX, WEIGHTS, Client, finished

TEXT = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.slow
def test_a_model_is_fetched_once_with_the_needed_files_only(client: Client, hub: HubServer) -> None:
    fetched = client.fetch()
    assert fetched.files == sorted([*TEXT, WEIGHTS])
    assert fetched.folder == client.cache / f"models--demo--model/snapshots/{COMMIT}"
    assert (fetched.folder / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()
    assert f"fetches the weights of demo/model, commit {COMMIT}" in fetched.log
    hub.requests.clear()
    assert client.fetch().folder == fetched.folder
    assert hub.downloads("") == []
    hub.requests.clear()
    assert client.fetch(revision=COMMIT).folder == fetched.folder
    assert hub.requests == [], hub.requests  # a commit never changes, so no request is needed


def test_gateways_and_plans_fetch_no_weights(client: Client, hub: HubServer, repository: Path) -> None:
    (repository / "hf_quant_config.json").write_text("{}")  # quantization that config.json may lack
    assert client.fetch(files="TEXT").files == sorted([*TEXT, "hf_quant_config.json"])
    assert hub.downloads(".safetensors") == []


def test_of_sharded_weights_the_files_of_the_index_are_fetched(
    client: Client, hub: HubServer, repository: Path
) -> None:
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (repository / WEIGHTS).unlink()
    for name in (*parts, "model-fp8.safetensors"):
        (repository / name).write_bytes(name.encode())
    (repository / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": parts[0], "b": parts[1]}}))
    assert client.fetch().files == sorted([*TEXT, INDEX, *parts])


@pytest.mark.slow
def test_two_processes_make_one_download(client: Client, hub: HubServer) -> None:
    hub.bytes_per_s = 8e6
    first, second = client.start(), client.start()
    assert finished(first).folder == finished(second).folder
    assert len(hub.downloads(WEIGHTS)) == 1


@pytest.mark.slow
def test_a_slow_download_logs_its_progress(client: Client, hub: HubServer) -> None:
    hub.bytes_per_s = 8e6
    fetched = client.fetch()
    assert fetched.told.pop(0) == f"fetches the weights of demo/model, commit {COMMIT}"
    line = re.compile(r"fetches demo/model: 0\.0[01] of 0\.01 GB asked for so far, [1-8] MB/s")
    assert fetched.told
    assert [told for told in fetched.told if not line.fullmatch(told)] == []
    assert [told for told in fetched.told if told not in fetched.log] == []


def read_terminal(window: int) -> str:
    """Return the next output to a terminal; "" when its last program has ended."""
    try:
        return os.read(window, 4096).decode(errors="replace")
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return ""


def test_a_terminal_shows_bars_of_the_weights(client: Client) -> None:
    window, programs = pty.openpty()
    termios.tcsetwinsize(programs, (40, 110))
    words = [sys.executable, "-c", FETCH, json.dumps(["demo/model", "ALL", {}])]
    process = subprocess.Popen(words, env=client.environment, stdout=subprocess.DEVNULL, stderr=programs)
    os.close(programs)
    shown = "".join(iter(lambda: read_terminal(window), ""))
    os.close(window)
    assert process.wait(60) == 0
    assert "Fetching 1 files: 100%" in shown
    assert "Fetching 4 files" not in shown
    assert "\r\n\r\n\r\n\r\n" not in shown  # there are no empty lines of bars that are not shown


@pytest.mark.slow
def test_ctrl_c_ends_a_download_at_once_and_leaves_no_part(client: Client, hub: HubServer) -> None:
    hub.bytes_per_s = 1e5  # the download would take two minutes
    process = client.start()
    eventually(lambda: hub.downloads(WEIGHTS) != [], 30.0, "no download begins")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=10)
    assert log.rstrip().endswith("KeyboardInterrupt")
    assert list(client.cache.glob("**/*.incomplete")) == []


@pytest.mark.slow
def test_an_interrupted_download_is_resumed(client: Client, hub: HubServer) -> None:
    chunk = 10 * 2**20  # the library writes chunks of this size
    hub.break_after = [chunk - 1, chunk + 1]
    assert (client.fetch().folder / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()
    ranges = [wanted for method, path, wanted in hub.requests if method == "GET" and path.endswith(f"/{WEIGHTS}")]
    assert ranges == ["", "", f"bytes={chunk}-"]


def test_a_download_dir_replaces_the_cache(client: Client, tmp_path: Path) -> None:
    fetched = client.fetch(download_dir=str(tmp_path / "models"))
    assert fetched.folder.is_relative_to(tmp_path / "models")
    assert not list(client.cache.glob("models--*"))


@pytest.mark.slow
def test_another_revision_has_a_folder_of_its_own(client: Client, hub: HubServer) -> None:
    hub.revisions["v2"] = "d" * 40
    assert client.fetch(files="TEXT").folder.name == COMMIT
    assert client.fetch(files="TEXT", revision="v2").folder.name == "d" * 40


@pytest.mark.slow
def test_a_token_gives_access_to_gated_models(client: Client, hub: HubServer) -> None:
    hub.token, hub.gated = "hf_secret", True
    refused = client.fetch()
    assert "is gated: accept its terms at" in refused.message
    assert "HF_TOKEN" in refused.message
    client.environment["HF_TOKEN"] = "hf_secret"
    assert WEIGHTS in client.fetch().files


@pytest.mark.slow
def test_offline_the_cache_is_used(client: Client, hub: HubServer) -> None:
    offline = {**client.environment, "HF_HUB_OFFLINE": "1"}
    without = Client(client.cache, offline).fetch()
    assert without.error == "HubUnreachable"
    assert f"the cache, {client.cache}, does not hold demo/model, and HF_HUB_OFFLINE" in without.message
    client.fetch(files="TEXT")
    part = Client(client.cache, offline).fetch()
    assert "holds a part of demo/model only" in part.message
    whole = client.fetch()
    hub.requests.clear()
    assert Client(client.cache, offline).fetch().folder == whole.folder
    assert hub.requests == []


@pytest.mark.slow
def test_the_cache_is_used_if_the_hub_cannot_be_reached(client: Client) -> None:
    fetched = client.fetch()
    client.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{free_port()}"
    assert client.fetch().folder == fetched.folder


Fault = Callable[[HubServer, Client, Path], object]


def _unreachable(hub: HubServer, client: Client, repository: Path) -> None:
    client.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{free_port()}"


def _read_only_cache(hub: HubServer, client: Client, repository: Path) -> None:
    client.environment["HF_HOME"] = "/proc/self"


def _without(*names: str) -> Fault:
    def fault(hub: HubServer, client: Client, repository: Path) -> None:
        for name in names:
            (repository / name).unlink()

    return fault


FAULTS: dict[str, tuple[Fault, list[str]]] = {
    "not there": (lambda hub, *_: hub.folders.clear(), ["has no model demo/model", "check the name"]),
    "private": (lambda hub, *_: setattr(hub, "token", "x"), ["or a private one", "HF_TOKEN"]),
    "out of order": (lambda hub, *_: setattr(hub, "status", 503), ["answers with status 503", "try again later"]),
    "forbidden": (lambda hub, *_: setattr(hub, "status", 403), ["refuses demo/model (status 403)", "HF_TOKEN"]),
    "unreachable": (_unreachable, ["does not hold demo/model", "cannot be reached", "HF_ENDPOINT", "HF_HOME"]),
    "another size": (
        lambda hub, *_: setattr(hub, "missing_bytes", 7),
        ["could not be fetched whole", "file should be of size"],
    ),
    "another digest": (lambda hub, *_: setattr(hub, "corrupt", True), [WEIGHTS, "SHA-256", "was removed"]),
    "broken off each time": (
        lambda hub, *_: hub.break_after.extend([1000] * 20),
        ["could not be fetched whole", "start again: files that are whole are kept"],
    ),
    "no config": (_without("config.json"), ["has no config.json", "README.md"]),
    "no safetensors": (
        _without(WEIGHTS, "consolidated.safetensors", "original/consolidated.safetensors"),
        ["has no *.safetensors", "pytorch_model.bin"],
    ),
    "no room to write": (_read_only_cache, ["cannot be written", "HF_HOME"]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_errors_name_the_cause_and_the_remedy(name: str, client: Client, hub: HubServer, repository: Path) -> None:
    fault, expected = FAULTS[name]
    fault(hub, client, repository)
    fetched = client.fetch()
    assert fetched.error in ("ModelNotFetched", "HubUnreachable")
    assert [words for words in expected if words not in fetched.message] == [], fetched.message
    assert "\n" not in fetched.message


def test_a_revision_that_is_not_there_is_named(client: Client) -> None:
    assert "demo/model has no revision 'v9'" in client.fetch(revision="v9").message


@pytest.mark.slow
def test_damaged_downloads_are_not_kept(client: Client, hub: HubServer) -> None:
    hub.corrupt = True
    assert "was removed" in client.fetch().message
    hub.corrupt = False
    assert (client.fetch().folder / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("path", ["./model", "/models/demo", "../demo/model", "demo", "a/b/c"])
def test_a_path_is_not_taken_for_a_name(path: str, client: Client, hub: HubServer) -> None:
    assert client.fetch(path).folder == Path(path)
    assert hub.requests == []


def test_a_folder_has_no_revision(client: Client) -> None:
    assert "is a folder, which has none" in client.fetch(str(DEMO), revision="main").message
