"""`baton serve` with KV tiers behind a prefill engine on two ranks, and hand-offs by way of the host to a decode engine
that guesses tokens ahead.

The prefill engine is killed, and its disk fills up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.engine import LLM, SamplingParams

from ..helpers.free_ports import free_port
from ..helpers.served import Server, baton_serve, config_file, eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root"),
]

MODEL = Path(__file__).parents[2] / "configs/demo/model"
ROLES = ["decode", "prefill"]
NUM_PROMPTS = 10
DISK_BYTES = 100 << 20


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mount a small disk for tiers."""
    folder = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("config"), free_port()
    config = config_file(folder, name="tiers", port=port)
    application = yaml.safe_load(config.read_text())
    args = application["applications"][0]["args"]
    args["engine"] |= {"max_model_len": 512}
    args["gateway"] |= {"local_prefill_max_tokens": 0}  # every prompt is handed over
    args["transfer"] |= {"buffer": "host", "buffer_bytes": 8 << 20}
    args["fleets"]["prefill"] |= {
        "engine": {"num_gpu_blocks_override": 40, "tensor_parallel_size": 2},  # of the prompts below no three fit
        "kv_tiers": {"host_bytes": 1 << 20, "disk_path": str(disk / "kv"), "disk_bytes": 20 << 20, "min_tokens": 64},
    }
    args["fleets"]["decode"] |= {"engine": {"speculative_config": {"method": "suffix"}}}
    config.write_text(yaml.safe_dump(application))
    with baton_serve(config, port) as server:
        yield server


def answers(server: Server) -> list[str]:
    found = []
    for number in range(NUM_PROMPTS):
        body = {
            "model": "baton-demo",
            "prompt": f"# {number}\n" + "def fox(lazy, dog):\n    return lazy + dog\n" * 11,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0).raise_for_status()
        assert response.headers["x-baton-path"].startswith("disaggregated")
        found.append(response.json()["choices"][0]["text"])
    return found


def measured(server: Server, name: str) -> float:
    """Return the sum of a metric over the engines that live now."""
    text = httpx.get(f"{server.url}/metrics", timeout=10.0).raise_for_status().text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"baton_{name}"
    )


def kill_the_prefill_engine(server: Server) -> None:
    """Kill the prefill engine, and return when its successor serves."""
    pid = server.rank_of("prefill")["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pid not in {rank["pid"] for rank in server.ranks()}, 30.0, "the engine lives on")
    server.wait_until_whole(ROLES)


def test_prefixes_come_out_of_tiers_and_answers_are_the_same_also_after_a_kill(server: Server) -> None:
    server.wait_until_whole(ROLES)
    computed = answers(server)
    server.wait_until_all_blocks_are_free()
    assert answers(server) == computed
    server.wait_until_all_blocks_are_free()
    eventually(lambda: measured(server, "kv_tier_restored_tokens_total") > 0, 10.0, "nothing was restored")
    assert measured(server, "kv_buffer_blocks") == 0

    kill_the_prefill_engine(server)
    assert measured(server, "kv_tier_blocks") > 0, "the disk is found again"
    assert answers(server) == computed
    eventually(lambda: measured(server, "kv_tier_restored_tokens_total") > 0, 10.0, "nothing was restored")
    assert measured(server, "kv_tier_failures_total") == 0
    server.wait_until_all_blocks_are_free()


def test_a_prediction_is_accepted_and_the_text_is_that_of_an_engine_that_draws_one_token_a_step(
    server: Server,
) -> None:
    messages = [{"role": "user", "content": "Write a function that adds two numbers."}]
    with LLM(MODEL, dtype="float32", max_model_len=512, num_threads=1) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        (undisturbed,) = llm.chat(messages, sampling, use_tqdm=False)
    expected = undisturbed.outputs[0].text

    def ask(**fields: object) -> dict[str, Any]:
        body = {"model": "baton-demo", "messages": messages, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        response = httpx.post(f"{server.url}/v1/chat/completions", json={**body, **fields}, timeout=60.0)
        assert response.raise_for_status().headers["x-baton-path"].startswith("disaggregated")
        return dict(response.json())

    def num_accepted() -> int:
        answer = ask(prediction={"type": "content", "content": expected}, baton_timeline=True)
        assert answer["choices"][0]["message"]["content"] == expected
        assert answer["usage"]["completion_tokens"] == 48
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] <= answer["baton_timeline"][0].get("num_accepted_tokens", 0)
        return int(details["accepted_prediction_tokens"])

    eventually(lambda: num_accepted() > 0, 60.0, "no draft was accepted")  # engines draft where it saved time lately
    counter = "baton_spec_decode_num_accepted_tokens_total"
    eventually(lambda: server.counted(counter, role="decode") > 0, 10.0, "accepted drafts are not counted")
    assert server.counted("baton_spec_decode_num_draft_tokens_total", role="prefill") == 0
    without = ask()
    assert without["choices"][0]["message"]["content"] == expected
    assert "completion_tokens_details" not in without["usage"]
    server.wait_until_all_blocks_are_free()


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb") as ballast:
        while True:
            ballast.write(b"\0" * (1 << 20))
            ballast.flush()


def test_a_full_disk_costs_a_prefill_engine_its_disk_tier_and_nothing_else(server: Server, disk: Path) -> None:
    server.wait_until_whole(ROLES)
    before = answers(server)
    server.wait_until_all_blocks_are_free()
    with contextlib.ExitStack() as kept:
        for file in (disk / "kv").iterdir():
            kept.enter_context(file.open("rb"))  # their room does not become free when the engine ends
        shutil.rmtree(disk / "kv")
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            fill(disk)
        kill_the_prefill_engine(server)
        for _ in range(2):
            assert answers(server) == before
            server.wait_until_all_blocks_are_free()
        eventually(lambda: measured(server, "kv_tier_blocks") > 0, 10.0, "memory is no tier any more")
        assert measured(server, "kv_tier_failures_total") == 1, "once: there is no disk tier"
