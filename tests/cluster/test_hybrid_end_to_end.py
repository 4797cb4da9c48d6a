"""`baton eval recall` of the demo model with recurrent states: handed over, from tiers, and while an engine is killed.

A state that is lost or stale gives wrong answers (`tests/unit/engine/test_hybrid_recall.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..helpers.free_ports import free_port
from ..helpers.served import BATON, Server, baton_serve, config_file, eventually
from .served_pair import ROLES

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

RIGHT = 0.98  # of the answers, disturbed or not
LENGTHS = "64,700,1050"  # tokens: of none, one and two checkpoints


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("config"), free_port()
    config = config_file(folder, name="hybrid", port=port)
    application = yaml.safe_load(config.read_text())
    args = application["applications"][0]["args"]
    args |= {"model": "configs/demo/hybrid", "model_id": "hybrid"}
    args["engine"] |= {"max_model_len": 1152}
    args["gateway"] |= {"local_prefill_max_tokens": 0}  # every prompt is handed over
    args["fleets"]["prefill"] |= {
        "engine": {"num_gpu_blocks_override": 90, "max_num_batched_tokens": 256},  # for one prompt of 1050 tokens
        "kv_tiers": {"host_bytes": 200 << 20, "min_tokens": 64},
    }
    config.write_text(yaml.safe_dump(application))
    with baton_serve(config, port) as server:
        server.wait_until_whole(ROLES)
        yield server


def asking(server: Server, file: Path, *, samples: int) -> subprocess.Popen[str]:
    """Start `baton eval recall`, which writes its result to `file`."""
    words = ["--base-url", server.url, "--lengths", LENGTHS, "--samples", str(samples), "--json", str(file)]
    return subprocess.Popen([BATON, "eval", "recall", *words], stderr=subprocess.PIPE, text=True)


def result_of(asked: subprocess.Popen[str], file: Path) -> dict[str, Any]:
    _, errors = asked.communicate(timeout=150)
    assert asked.returncode == 0, errors
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["errors"] == 0, errors
    return result


def test_values_are_recalled_through_prefill_and_decode_and_again_out_of_tiers(server: Server, tmp_path: Path) -> None:
    for turn in range(2):
        file = tmp_path / f"{turn}.json"
        result = result_of(asking(server, file, samples=8), file)
        assert result["accuracy"] >= RIGHT, result
        assert all(path.startswith("disaggregated") for path in result["paths"]), result
    assert server.counted("baton_kv_tier_restored_tokens_total") >= 512, "no checkpoint was restored"
    assert server.counted("baton_kv_tier_failures_total") == 0
    server.wait_until_all_blocks_are_free()


def test_values_are_recalled_while_the_decode_engine_is_killed(server: Server, tmp_path: Path) -> None:
    pid = server.rank_of("decode")["pid"]
    file = tmp_path / "killed.json"
    before = server.counted("baton_request_success_total")
    asked = asking(server, file, samples=40)
    eventually(lambda: server.counted("baton_request_success_total") >= before + 4, 60.0, "no question was answered")
    os.kill(pid, signal.SIGKILL)
    result = result_of(asked, file)
    assert result["accuracy"] >= RIGHT, result
    assert server.counted("baton_request_retries_total") > 0, "no question met the dead engine"
