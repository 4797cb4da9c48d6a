"""Commands and scripts take models by their name, from a server that speaks the Hub's API."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ...helpers.hub_server import COMMIT, HubServer
from ...helpers.served import BATON
from .hub_client import DEMO, Client

pytestmark = pytest.mark.slow


def application(folder: Path, **engine: Any) -> Path:
    file = folder / "application.yaml"
    file.write_text(json.dumps({"model": "demo/model", "engine": engine, "fleets": {"unified": {}}}))
    return file


def baton(client: Client, *words: object) -> subprocess.CompletedProcess[str]:
    command = [BATON, *map(str, words)]
    return subprocess.run(command, env=client.environment, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_check_reads_the_config_from_the_hub_and_fetches_no_weights(
    client: Client, hub: HubServer, tmp_path: Path
) -> None:
    done = baton(client, "check", application(tmp_path))
    assert done.returncode == 0, done.stderr
    aside = "(not checked: the weights of demo/model, which engines fetch)"
    assert f"baton is fine: demo/model, 1 unified {aside}" in done.stdout
    dummy, divided = tmp_path / "dummy", tmp_path / "divided"
    dummy.mkdir()
    divided.mkdir()
    files = application(dummy, load_format="dummy"), application(divided, tensor_parallel_size=3)
    refused = baton(client, "check", *files)
    assert refused.returncode == 1
    assert refused.stdout.endswith("1 unified\n")
    assert "unified: tensor_parallel_size" in refused.stderr
    assert hub.downloads(".safetensors") == []


def test_check_without_a_network_names_what_it_could_not_check(client: Client, tmp_path: Path) -> None:
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


def test_plan_accepts_a_name(client: Client, hub: HubServer, tmp_path: Path) -> None:
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
    done = baton(client, "serve", "demo/model", "--config", file)  # refused before Ray starts
    assert done.returncode == 2
    assert done.stderr.startswith("error: model: demo/model is gated"), done.stderr


GATEWAY = """
import sys
from baton.cluster.ingress.gateway_server import served_model
from baton.cluster.spec import load_spec
model = served_model(load_spec({"model": "demo/model", "fleets": {"unified": {}}}))
print(model.model_id, model.tokenizer.decode(model.tokenizer.encode("def main():")))
"""


def test_a_gateway_fetches_the_tokenizer_and_the_config_and_no_weights(client: Client, hub: HubServer) -> None:
    words = [sys.executable, "-c", GATEWAY]
    done = subprocess.run(words, env=client.environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "demo/model def main():\n", done.stderr
    assert hub.downloads("/tokenizer.json") != []
    assert hub.downloads(".safetensors") == []


LLM = """
import sys
from baton.engine import LLM, SamplingParams
with LLM("demo/model", device="cpu", kv_cache_memory_bytes=2**24, load_format=sys.argv[1]) as llm:
    print(len(llm.generate(["def main():"], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("load_format", "downloads"), [("dummy", 0), ("auto", 1)])
def test_llm_accepts_a_name(load_format: str, downloads: int, client: Client, hub: HubServer) -> None:
    words = [sys.executable, "-c", LLM, load_format]
    done = subprocess.run(words, env=client.environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "4\n", done.stderr
    assert len(hub.downloads(".safetensors")) == downloads
