"""`baton serve` with KV tiers behind a prefill engine on two ranks, and hand-offs by way of the host.

The engine is killed, and its disk fills up.
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

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ..helpers.free_ports import free_port
from ..helpers.served import Server, baton_serve, config_file, eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root"),
]

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
