"""Models by their name, fetched from a server that speaks the Hub's API, whole and misbehaving."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ...helpers.free_ports import free_port
from ...helpers.hub_server import COMMIT, HubServer, hub_server
from ...helpers.served import BATON, eventually

DEMO = Path(__file__).parents[3] / "configs/demo/model"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXT = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
# The library reads its environment when it is imported, so each case has a process of its own.
FETCH = """
import json, logging, sys
logging.basicConfig(level="INFO", format="%(name)s %(message)s")
from baton.engine.hf_config import hub, hub_progress
from baton.engine.hf_config.errors import ModelError
hub_progress.LOG_S = 0.2
told = []
model, files, options = json.loads(sys.argv[1])
try:
    answer = {"folder": str(hub.model_folder(model, hub.Files[files], progress=told.append, **options)), "told": told}
except ModelError as error:
    answer = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(answer))
"""


@dataclass
class Fetched:
    folder: Path
    error: str
    message: str
    log: str
    told: list[str]  # of its progress

    @property
    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


@dataclass
class Client:
    """Fetches models in processes whose environment leads to a server."""

    cache: Path
    environment: dict[str, str]

    def start(self, model: str = "demo/model", files: str = "ALL", **options: Any) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", FETCH, json.dumps([model, files, options])]
        return subprocess.Popen(words, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def fetch(self, model: str = "demo/model", files: str = "ALL", **options: Any) -> Fetched:
        return finished(self.start(model, files, **options))


def finished(process: subprocess.Popen[str]) -> Fetched:
    output, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    answer = json.loads(output)
    return Fetched(
        Path(answer.get("folder", "")), answer.get("error", ""), answer.get("message", ""), log, answer.get("told", [])
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a folder with the demo model, and with files that nobody needs."""
    folder = tmp_path / "repository"
    shutil.copytree(DEMO, folder)
    (folder / "original").mkdir()
    for name in ("README.md", "pytorch_model.bin", "original/consolidated.safetensors", "consolidated.safetensors"):
        (folder / name).write_bytes(b"0" * 1000)
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[HubServer]:
    with hub_server(demo__model=repository) as server:
        yield server


@pytest.fixture
def client(hub: HubServer, tmp_path: Path) -> Client:
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    return Client(tmp_path / "cache/hub", own)


def test_a_name_is_fetched_once_and_only_what_is_read(client: Client, hub: HubServer) -> None:
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
    assert hub.requests == [], hub.requests  # a commit never changes


def test_gateways_and_plans_fetch_no_weights(client: Client, hub: HubServer) -> None:
    assert client.fetch(files="TEXT").files == TEXT
    assert hub.downloads(".safetensors") == []


def test_of_divided_weights_the_files_of_the_index_come(client: Client, hub: HubServer, repository: Path) -> None:
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (repository / WEIGHTS).unlink()
    for name in (*parts, "model-fp8.safetensors"):
        (repository / name).write_bytes(name.encode())
    (repository / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": parts[0], "b": parts[1]}}))
    assert client.fetch().files == sorted([*TEXT, INDEX, *parts])


def test_two_processes_make_one_download(client: Client, hub: HubServer) -> None:
    hub.bytes_per_s = 8e6
    first, second = client.start(), client.start()
    assert finished(first).folder == finished(second).folder
    assert len(hub.downloads(WEIGHTS)) == 1


def test_a_slow_download_tells_how_far_it_is(client: Client, hub: HubServer) -> None:
    hub.bytes_per_s = 8e6
    fetched = client.fetch()
    assert fetched.told.pop(0) == f"fetches the weights of demo/model, commit {COMMIT}"
    line = re.compile(r"fetches demo/model: 0\.0[01] of 0\.01 GB asked for so far, [1-8] MB/s")
    assert fetched.told
    assert [told for told in fetched.told if not line.fullmatch(told)] == []
    assert [told for told in fetched.told if told not in fetched.log] == []


def read_terminal(window: int) -> str:
    """Return what a terminal shows next; empty when its last program has ended."""
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
    assert "\r\n\r\n\r\n\r\n" not in shown  # no line is kept for a bar that is not there


def test_ctrl_c_ends_a_download_at_once_and_leaves_no_part(client: Client, hub: HubServer) -> None:
    hub.bytes_per_s = 1e5  # for two minutes
    process = client.start()
    eventually(lambda: hub.downloads(WEIGHTS) != [], 30.0, "no download begins")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=10)
    assert log.rstrip().endswith("KeyboardInterrupt")
    assert list(client.cache.glob("**/*.incomplete")) == []


def test_a_download_that_breaks_off_goes_on_where_it_was(client: Client, hub: HubServer) -> None:
    chunk = 10 * 2**20  # which the library writes at once
    hub.break_after = [chunk - 1, chunk + 1]
    assert (client.fetch().folder / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()
    ranges = [wanted for method, path, wanted in hub.requests if method == "GET" and path.endswith(f"/{WEIGHTS}")]
    assert ranges == ["", "", f"bytes={chunk}-"]


def test_a_mirror_is_another_endpoint_and_a_cache_another_folder(client: Client, tmp_path: Path) -> None:
    fetched = client.fetch(download_dir=str(tmp_path / "models"))
    assert fetched.folder.is_relative_to(tmp_path / "models")
    assert not list(client.cache.glob("models--*"))


def test_another_revision_has_a_folder_of_its_own(client: Client, hub: HubServer) -> None:
    hub.revisions["v2"] = "d" * 40
    assert client.fetch(files="TEXT").folder.name == COMMIT
    assert client.fetch(files="TEXT", revision="v2").folder.name == "d" * 40


def test_a_token_opens_what_is_gated(client: Client, hub: HubServer) -> None:
    hub.token, hub.gated = "hf_secret", True
    refused = client.fetch()
    assert "is gated: accept its terms at" in refused.message
    assert "HF_TOKEN" in refused.message
    client.environment["HF_TOKEN"] = "hf_secret"
    assert WEIGHTS in client.fetch().files


def test_offline_the_cache_answers(client: Client, hub: HubServer) -> None:
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


def test_a_hub_that_cannot_be_reached_leaves_the_cache(client: Client) -> None:
    fetched = client.fetch()
    client.environment["HF_ENDPOINT"] = f"http://127.0.0.1:{free_port()}"
    assert client.fetch().folder == fetched.folder


def application(folder: Path, **engine: Any) -> Path:
    file = folder / "application.yaml"
    file.write_text(json.dumps({"model": "demo/model", "engine": engine, "fleets": {"unified": {}}}))
    return file


def baton(client: Client, *words: object) -> subprocess.CompletedProcess[str]:
    command = [BATON, *map(str, words)]
    return subprocess.run(command, env=client.environment, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_check_reads_what_the_hub_says_and_fetches_no_weights(client: Client, hub: HubServer, tmp_path: Path) -> None:
    done = baton(client, "check", application(tmp_path))
    assert done.returncode == 0, done.stderr
    aside = "(not checked: the weights of demo/model, which engines fetch)"
    assert f"baton is fine: demo/model, 1 unified {aside}" in done.stdout
    assert baton(client, "check", application(tmp_path, load_format="dummy")).stdout.endswith("1 unified\n")
    refused = baton(client, "check", application(tmp_path, tensor_parallel_size=3))
    assert refused.returncode == 1
    assert "unified: tensor_parallel_size" in refused.stderr
    assert hub.downloads(".safetensors") == []


def test_check_without_a_network_says_what_it_could_not_check(client: Client, tmp_path: Path) -> None:
    client.environment["HF_HUB_OFFLINE"] = "1"
    done = baton(client, "check", application(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "not checked: how demo/model divides, since the cache" in done.stdout


def test_check_refuses_a_model_that_is_not_there(client: Client, hub: HubServer, tmp_path: Path) -> None:
    hub.folders.clear()
    done = baton(client, "check", application(tmp_path))
    assert done.returncode == 1
    assert f"model: {hub.url} has no model demo/model" in done.stderr


LOAD = """
import sys
from baton.cluster.spec import load_spec
spec = load_spec({"model": "demo/model", "fleets": {"unified": {}}, "download_dir": "models"})
again = load_spec(spec.engine_args())
engine = again.engine_config("unified")
print(spec.served_model_id, spec.revision, again.revision, engine.revision, engine.download_dir)
"""


def test_an_application_keeps_its_commit_and_its_cache(client: Client, hub: HubServer, tmp_path: Path) -> None:
    words = [sys.executable, "-c", LOAD]
    done = subprocess.run(words, env=client.environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["demo/model", COMMIT, COMMIT, COMMIT, str(tmp_path / "models")], done.stderr
    assert len([path for _, path, _ in hub.requests if "/revision/" in path]) == 1


def test_plan_takes_a_name(client: Client, hub: HubServer, tmp_path: Path) -> None:
    done = baton(client, "plan", application(tmp_path), "--gpus-per-node", 0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "baton: demo/model on 1 node with no GPU" in done.stdout
    assert hub.downloads(".safetensors") == []


def test_another_model_than_the_files_has_no_revision_of_it(client: Client, hub: HubServer, tmp_path: Path) -> None:
    file = tmp_path / "application.yaml"
    file.write_text(json.dumps({"model": "gone/model", "revision": "v7", "fleets": {"unified": {}}}))
    done = baton(client, "plan", file, "--gpus-per-node", 0, "--model", DEMO)
    assert done.returncode == 0, done.stdout + done.stderr
    hub.token, hub.gated = "hf_secret", True
    done = baton(client, "serve", "demo/model", "--config", file)
    assert "demo/model is gated" in done.stderr, done.stderr


def test_serve_refuses_a_name_before_ray_starts(client: Client, hub: HubServer) -> None:
    hub.token, hub.gated = "hf_secret", True
    done = baton(client, "serve", "demo/model")
    assert done.returncode == 2
    assert done.stderr.startswith("error: model: demo/model is gated")


LLM = """
import sys
from baton.engine import LLM, SamplingParams
with LLM("demo/model", device="cpu", kv_cache_memory_bytes=2**24, load_format=sys.argv[1]) as llm:
    print(len(llm.generate(["def main():"], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("load_format", "downloads"), [("dummy", 0), ("auto", 1)])
def test_llm_takes_a_name(load_format: str, downloads: int, client: Client, hub: HubServer) -> None:
    words = [sys.executable, "-c", LLM, load_format]
    done = subprocess.run(words, env=client.environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "4\n", done.stderr
    assert len(hub.downloads(".safetensors")) == downloads


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
    "unreachable": (_unreachable, ["does not hold demo/model", "cannot be reached", "HF_ENDPOINT"]),
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


@pytest.mark.parametrize("name", FAULTS)
def test_errors_say_what_is_wrong_and_what_to_do(name: str, client: Client, hub: HubServer, repository: Path) -> None:
    fault, expected = FAULTS[name]
    fault(hub, client, repository)
    fetched = client.fetch()
    assert fetched.error in ("ModelNotFetched", "HubUnreachable")
    assert [words for words in expected if words not in fetched.message] == [], fetched.message
    assert "\n" not in fetched.message


def test_a_revision_that_is_not_there_is_named(client: Client) -> None:
    assert "demo/model has no revision 'v9'" in client.fetch(revision="v9").message


def test_what_arrived_wrong_is_not_kept(client: Client, hub: HubServer) -> None:
    hub.corrupt = True
    assert "was removed" in client.fetch().message
    hub.corrupt = False
    assert (client.fetch().folder / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()


@pytest.mark.parametrize("path", ["./model", "/models/demo", "../demo/model", "demo", "a/b/c"])
def test_a_path_is_no_name(path: str, client: Client, hub: HubServer) -> None:
    assert client.fetch(path).folder == Path(path)
    assert hub.requests == []


def test_a_folder_has_no_revision(client: Client) -> None:
    assert "is a folder, which has none" in client.fetch(str(DEMO), revision="main").message
