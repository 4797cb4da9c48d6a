"""`baton serve` with full disks: KV tiers behind a prefill engine on two ranks, and a decode engine with drafts.

Hand-offs go through host memory. The prefill engine is killed, and its disk fills up; then the disk with Ray's files
does. In between, tests run the commands that the console names. The tests share one server and run in the order of the
file.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.engine import LLM, SamplingParams

from ..helpers.free_ports import free_port
from ..helpers.served import BATON, Server, baton_serve, config_file, eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts small disks, which needs root"),
]

MODEL = Path(__file__).parents[2] / "configs/demo/model"
ROLES = ["decode", "prefill"]
NUM_PROMPTS = 10
DISK_BYTES = 100 << 20
RAY_DISK_BYTES = 200 << 20
RAY_FREE_BYTES = 4 << 20  # less than the 5 % that Ray demands


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mount a small disk for the tiers."""
    folder = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def ray_disk() -> Iterator[Path]:
    """Mount a disk for Ray's files. Its path is short: it holds sockets."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={RAY_DISK_BYTES}", "tmpfs", folder], check=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_TMPDIR", str(folder))
        yield folder
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, disk: Path, ray_disk: Path) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("config"), free_port()
    config = config_file(folder, name="tiers", port=port)
    application = yaml.safe_load(config.read_text())
    args = application["applications"][0]["args"]
    args["engine"] |= {"max_model_len": 512}
    args["gateway"] |= {"local_prefill_max_tokens": 0}  # every prompt is handed over
    args["transfer"] |= {"buffer": "host", "buffer_bytes": 8 << 20}
    args["fleets"]["prefill"] |= {
        "engine": {"num_gpu_blocks_override": 40, "tensor_parallel_size": 2},  # no three of the prompts below fit
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

    eventually(lambda: num_accepted() > 0, 60.0, "no draft was accepted")  # engines draft where that saved time lately
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
            kept.enter_context(file.open("rb"))  # the engine's exit does not free the space of open files
        shutil.rmtree(disk / "kv")
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            fill(disk)
        kill_the_prefill_engine(server)
        for _ in range(2):
            assert answers(server) == before
            server.wait_until_all_blocks_are_free()
        eventually(lambda: measured(server, "kv_tier_blocks") > 0, 10.0, "memory is no tier any more")
        assert measured(server, "kv_tier_failures_total") == 1, "once: there is no disk tier"


def test_each_engine_is_recorded_at_the_address_that_is_printed(server: Server) -> None:
    (line,) = [line for line in server.output().splitlines() if line.startswith("baton drain RANK")]
    words = ["profile", "--seconds", "1", *line.split()[3:]]
    done = subprocess.run([BATON, *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    _, *told = done.stdout.splitlines()
    assert sorted(each.split("-")[0] for each in told) == ["decode", "prefill"]
    for each in told:
        file = Path(each.partition(" MB in ")[2].partition(" on ")[0])
        with gzip.open(file, "rt") as trace:
            assert "traceEvents" in json.load(trace)
        file.unlink()


def test_the_command_that_is_printed_drains_a_group(server: Server) -> None:
    """Other clusters may run on this machine, so `auto` would be ambiguous."""
    (line,) = [line for line in server.output().splitlines() if line.startswith("baton drain RANK")]
    rank = server.rank_of("decode")["rank"]
    words = line.replace("RANK", str(rank)).split()[1:]
    done = subprocess.run([BATON, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"rank {rank} is draining" in done.stdout
    assert f"baton status --url {server.url}" in server.output()


def fill_rays(disk: Path) -> None:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with (disk / "filling").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - RAY_FREE_BYTES)


def clear(disk: Path) -> None:
    (disk / "filling").unlink()


def test_a_disk_that_fills_up_while_it_serves_is_named_once(server: Server, ray_disk: Path) -> None:
    told = f"warning: the disk of {ray_disk}/ray is 9"
    assert told not in server.output()
    fill_rays(ray_disk)
    eventually(lambda: told in server.output(), 60, server.output)
    clear(ray_disk)
    check = subprocess.run([BATON, "check", "configs/serve/demo.yaml"], capture_output=True, text=True, timeout=60)
    assert "the disk of" not in check.stderr
    fill_rays(ray_disk)
    eventually(lambda: server.output().count(told) == 2, 60, server.output)
    check = subprocess.run([BATON, "check", "configs/serve/demo.yaml"], capture_output=True, text=True, timeout=60)
    assert f"this machine: the disk of {ray_disk}/ray is 9" in check.stderr
    assert check.returncode == 0
    clear(ray_disk)


def test_a_disk_that_is_full_is_named_before_the_start(ray_disk: Path) -> None:
    fill_rays(ray_disk)
    nowhere = ["--address", f"127.0.0.1:{free_port()}", "--port", str(free_port())]
    words = ["serve", "configs/demo/model", "--load-format", "dummy", *nowhere]
    done = subprocess.run([BATON, *words], capture_output=True, text=True, timeout=60)
    clear(ray_disk)
    assert done.returncode == 1, "there is no such cluster"
    assert done.stdout.index(f"warning: the disk of {ray_disk}/ray is 9") > 0
