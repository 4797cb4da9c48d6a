"""The command line without a server.

Commands that start nothing run in this process (`run_baton`), others in one of their own (`baton`).
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from baton.cluster.cli.http_client import print_ranks
from baton.cluster.cli.local_application import last_error
from baton.cluster.cli.serve import PortTaken, claimed_ports
from baton.cluster.contracts import EngineTrace
from baton.cluster.spec import FleetSpec, load_spec

from ...helpers.baton_command import run_baton
from ...helpers.free_ports import free_port
from ...helpers.served import BATON

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(60), pytest.mark.slow]

WITHOUT_TORCH = ("--load-format", "dummy")  # with real weights `serve` reads their headers first, which loads torch


@pytest.fixture
def model() -> Path:
    return Path(__file__).parents[3] / "configs/demo/model"


def baton(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BATON, *words], capture_output=True, text=True, timeout=50, env={**os.environ, "COLUMNS": "200", **environment}
    )


@pytest.fixture
def serving_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a `baton serve` that would start something in this process fail."""
    monkeypatch.setattr("baton.cluster.cli.serve.run", lambda *_: pytest.fail("it would have been served"))


def test_help_names_every_command() -> None:
    done = run_baton("--help")
    assert done.returncode == 0
    for command in ("serve", "chat", "check", "drain", "plan", "status", "bench", "eval"):
        assert command in done.stdout


def test_help_is_whole_in_a_narrow_terminal() -> None:
    options = run_baton("bench", "serve", "--help", COLUMNS="80").stdout
    for name in ("--prefix-repetition-num-prefixes", "--prefix-repetition-suffix-len", "--percentile-metrics"):
        assert f"  {name} <" in options
    assert "one trace for each engine." in " ".join(run_baton("--help", COLUMNS="60").stdout.split())


def test_help_of_serve_tells_how_to_start() -> None:
    assert "baton serve configs/demo/model --prefill 1 --decode 1" in run_baton("serve", "--help").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prefill", "1"), "prefill engines need decode engines"),
        (("--tp", "0"), "tensor_parallel_size"),
        (("--tp", "3"), "num_attention_heads (4)"),
        (("--ep",), "has no experts"),
        (("--max-num-seq", "4"), "did you mean 'max_num_seqs'?"),
        (("stray",), "unexpected argument 'stray'"),
        (("--dtype", "[float32"), "'[float32' is not valid YAML"),
        (("--tp", "2", "--tensor-parallel-size", "4"), "--tensor-parallel-size 4 and its short form 2"),
        (("--api-key", ""), "not empty"),
    ],
)
@pytest.mark.usefixtures("serving_fails")
def test_serve_refuses_what_cannot_work(model: Path, words: tuple[str, ...], said: str) -> None:
    done = run_baton("serve", str(model), *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_serve_refuses_a_port_in_use(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = baton("serve", str(model), *WITHOUT_TORCH, "--port", str(port))
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr


@pytest.fixture
def claimed(model: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """Claim a port at the parameter's address, without listening, as another `baton serve` does."""
    port = free_port()
    with claimed_ports(on_port(model, port, request.param)):
        yield port


def on_port(model: Path, port: int, host: str) -> FleetSpec:
    return load_spec({"model": str(model), "fleets": {"unified": {}}, "gateway": {"host": host, "port": port}})


@pytest.mark.parametrize(
    ("claimed", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
        ("::", "0.0.0.0"),
        ("127.0.0.1", "::"),
    ],
    indirect=["claimed"],
)
def test_of_two_that_serve_on_one_port_only_the_first_starts(model: Path, claimed: int, host: str) -> None:
    done = baton("serve", str(model), *WITHOUT_TORCH, "--host", host, "--port", str(claimed))
    assert done.returncode == 1
    assert f"port {claimed} on {host} cannot be used (another `baton serve`" in done.stderr
    assert "--port" in done.stderr
    assert "Ray" not in done.stdout


def test_of_many_that_claim_a_port_at_once_exactly_one_gets_it(model: Path) -> None:
    spec, ready, all_tried = on_port(model, free_port(), "127.0.0.1"), threading.Barrier(8), threading.Barrier(8)

    def claim(_: int) -> bool:
        ready.wait()
        try:
            with claimed_ports(spec):
                all_tried.wait()
                return True
        except PortTaken:
            all_tried.wait()
            return False

    with ThreadPoolExecutor(8) as several:
        assert sum(several.map(claim, range(8))) == 1
    with claimed_ports(spec):
        pass


def test_addresses_that_do_not_overlap_may_have_the_same_port(model: Path) -> None:
    port = free_port()
    with claimed_ports(on_port(model, port, "127.0.0.1")), claimed_ports(on_port(model, port, "127.0.0.2")):
        pass


def test_every_rank_s_port_is_claimed_where_each_has_one(model: Path) -> None:
    port = free_port()
    args = {"model": str(model), "load_balancing": "external", "fleets": {"unified": {"replicas": 3}}}
    with claimed_ports(load_spec({**args, "gateway": {"host": "127.0.0.1", "port": port}})):
        with pytest.raises(PortTaken, match=str(port + 2)), claimed_ports(on_port(model, port + 2, "127.0.0.1")):
            pass
        with claimed_ports(on_port(model, port + 3, "127.0.0.1")):
            pass


def test_serve_refuses_an_address_of_another_machine(model: Path) -> None:
    done = baton("serve", str(model), *WITHOUT_TORCH, "--host", "203.0.113.9", "--port", str(free_port()))
    assert done.returncode == 1
    assert "--host" in done.stderr
    assert "--port" not in done.stderr


def test_a_server_may_be_named_without_its_scheme_but_not_with_a_foreign_one() -> None:
    port = free_port()
    assert f"no answer from http://localhost:{port}" in run_baton("status", "--url", f"localhost:{port}").stderr
    for url in ("ftp://localhost", "http://"):
        done = run_baton("status", "--url", url)
        assert done.returncode == 2
        assert url in done.stderr


def test_a_rank_takes_one_line_of_a_terminal_with_80_columns() -> None:
    stats = {f"num_requests_{state}": 0 for state in ("running", "waiting", "waiting_for_kv")}
    rank = {"rank": 11, "role": "prefill", "engine_id": "prefill-djfzxwas", "pid": 145350, "node_ip": "192.168.102.2"}
    rank |= {"draining": False, "circuit": "closed", "num_blocks": 16384, "stats": stats | {"num_blocks_free": 16384}}
    rank |= {"reads_from": [], "num_running": 0}
    told = io.StringIO()
    print_ranks(Console(file=told, width=80), {"data": [rank], "gateways": [], "starting": []})
    (line,) = [line for line in told.getvalue().splitlines() if "prefill" in line]
    assert "16384/16384" in line


def test_status_shows_over_what_engines_read_each_other_and_marks_slow_ways() -> None:
    rank = {"rank": 1, "role": "decode", "engine_id": "decode-a", "pid": 1, "node_ip": "192.0.2.1", "draining": False}
    rank |= {"circuit": "closed", "num_blocks": 8, "stats": None, "num_running": None}
    lane = {"transport": "cuda_ipc", "bytes_per_s": 3.4e11, "is_slow": False}
    rank["reads_from"] = [
        lane | {"engine_id": "prefill-b"},
        lane | {"engine_id": "prefill-c", "transport": "nixl/UCX", "bytes_per_s": 4e8, "is_slow": True},
        lane | {"engine_id": "prefill-d", "transport": "nixl/UCX staged", "bytes_per_s": 1.1e10, "is_staged": True},
    ]
    told = io.StringIO()
    print_ranks(Console(file=told, width=80), {"data": [rank], "gateways": [], "starting": []})
    lines = [line.split() for line in told.getvalue().splitlines() if "prefill" in line]
    assert lines == [
        ["decode-a", "prefill-b", "cuda_ipc", "340.0"],
        ["decode-a", "prefill-c", "nixl/UCX", "0.4:", "TCP?"],
        ["decode-a", "prefill-d", "nixl/UCX", "staged", "11.0"],
    ]


def test_status_shows_how_many_guessed_tokens_were_right() -> None:
    rank = {"rank": 1, "role": "unified", "engine_id": "unified-a", "pid": 1, "node_ip": "192.0.2.1"}
    rank |= {"draining": False, "circuit": "closed", "num_blocks": 8, "reads_from": []}
    rank |= {"num_running": 0}
    stats = {f"num_requests_{state}": 0 for state in ("running", "waiting", "waiting_for_kv")}
    counted = {"num_drafts": 1000, "num_draft_tokens": 4000, "num_accepted_tokens": 3000}
    for speculation, shown in ((counted, True), ({**counted, "num_drafts": 0}, False), (None, False)):
        told = io.StringIO()
        rank["stats"] = stats | {"speculation": speculation}
        print_ranks(Console(file=told, width=80), {"data": [rank], "gateways": [], "starting": []})
        lines = [line.split() for line in told.getvalue().splitlines()]
        assert (["unified-a", "4,000", "75%", "4.0"] in lines) is shown
        assert ("Speculation" in told.getvalue()) is shown


def test_status_shows_what_engines_measured() -> None:
    rank = {"rank": 1, "role": "unified", "engine_id": "unified-a", "pid": 1, "node_ip": "192.0.2.1"}
    rank |= {"draining": False, "circuit": "closed", "num_blocks": 8, "reads_from": []}
    rank |= {"num_running": 0}
    stats = {f"num_requests_{state}": 0 for state in ("running", "waiting", "waiting_for_kv")}
    decode = {"base_s": 0.004, "unit_s": 0.001}
    for times, shown in (
        ({"prefill": {"base_s": 0.0, "unit_s": 5e-5}, "decode": decode}, ["unified-a", "20,000", "5.0", "1.000"]),
        ({"prefill": None, "decode": {"base_s": 0.005, "unit_s": 0.0}}, ["unified-a", "?", "5.0", "?"]),
        ({"prefill": {"base_s": 0.001, "unit_s": 0.0}, "decode": decode}, ["unified-a", "?", "5.0", "1.000"]),
        ({"prefill": None, "decode": None}, None),
    ):
        told = io.StringIO()
        rank["stats"] = stats | {"step_times": times}
        print_ranks(Console(file=told, width=80), {"data": [rank], "gateways": [], "starting": []})
        lines = [line.split() for line in told.getvalue().splitlines()]
        assert ("Measured lately" in told.getvalue()) is (shown is not None)
        assert shown is None or shown in lines


def test_unknown_environment_variables_are_an_error() -> None:
    done = run_baton("status", BATON_PORT="1")
    assert done.returncode == 2
    assert "BATON_PORT" in done.stderr


def test_status_and_chat_say_when_nobody_answers() -> None:
    for command in ("status", "chat"):
        done = run_baton(command, "--url", f"http://127.0.0.1:{free_port()}")
        assert done.returncode == 1
        assert "no answer from" in done.stderr


@pytest.mark.parametrize(
    "words", [("serve", "configs/demo/model", *WITHOUT_TORCH), ("drain", "0")], ids=lambda words: words[0]
)
def test_a_ray_cluster_that_is_not_there_is_missed_at_once(words: tuple[str, ...]) -> None:
    port = free_port()
    done = baton(*words, "--address", f"127.0.0.1:{port}")
    assert done.returncode == 1
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in done.stderr


def test_check_judges_every_file(model: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump({"model": str(model), "fleets": {"unified": {}}}))
    bad.write_text(yaml.safe_dump({"model": str(model), "fleets": {"decode": {}}}))
    assert run_baton("check", str(good)).returncode == 0
    done = run_baton("check", str(good), str(bad))
    assert done.returncode == 1
    assert "is fine" in done.stdout
    assert "decode engines need prefill engines" in done.stderr


CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("file", ["serve/one_gpu.yaml", "ray/one_gpu.yaml"])
def test_check_takes_what_another_command_writes_into_a_pipe(file: str) -> None:
    """A pipe can be read once."""
    written = (CONFIGS / file).read_text()
    done = subprocess.run([BATON, "check", "/dev/stdin"], input=written, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert "is fine" in done.stdout


def test_check_takes_every_config_that_is_shipped() -> None:
    files = sorted(str(file) for kind in ("ray", "serve") for file in (CONFIGS / kind).glob("*.yaml"))
    done = run_baton("check", *files)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == files


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"provider": {"type": "nowhere"}}, "nowhere"),
        ({"file_mount": {}}, "'file_mount' was unexpected"),
        ({"auth": {"ssh_user": 3}}, "auth.ssh_user: 3"),
        ({"provider": None}, "provider: "),
    ],
)
def test_check_refuses_a_cluster_that_ray_up_would_not_start(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    file = tmp_path / "cluster.yaml"
    config = yaml.safe_load((CONFIGS / "ray/on-prem.yaml").read_text()) | change
    file.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
    done = run_baton("check", str(file))
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("setting", "is_said"),
    [("UCX_TLS=tcp", True), ("UCX_TLS=tcp,cuda_copy", True), ("UCX_TLS=rc,tcp", False), ("UCX_TLS=^tcp", False)],
)
def test_a_ray_cluster_whose_machines_reach_each_other_by_tcp_alone_is_said(
    tmp_path: Path, setting: str, is_said: bool
) -> None:
    config = yaml.safe_load((CONFIGS / "ray/on-prem.yaml").read_text())
    config["worker_start_ray_commands"][-1] = f"{setting} {config['worker_start_ray_commands'][-1]}"
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    done = run_baton("check", str(file))
    assert done.returncode == 0, done.stderr
    assert (f"{setting}: KV blocks of GPUs go from machine to machine through TCP" in done.stdout) is is_said


def test_a_ray_cluster_is_not_taken_for_an_application() -> None:
    done = run_baton("plan", str(CONFIGS / "ray/on-prem.yaml"))
    assert done.returncode == 1
    assert "describes a Ray cluster" in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("applications: [3]", "applications.0: "),
        ("model: configs/demo/model\nfleets: {unified: {}}\ngateway: 3", "gateway: "),
        ("model: configs/demo/model\nfleets: {unified: {}}\nengine:", "engine: "),
    ],
)
@pytest.mark.usefixtures("serving_fails")
def test_serve_refuses_a_file_in_the_words_of_check(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(content)
    served, checked = run_baton("serve", "--config", str(file), "--port", "9000"), run_baton("check", str(file))
    assert (served.returncode, checked.returncode) == (2, 1)
    assert said in served.stderr
    assert said in checked.stderr


def test_a_result_that_could_not_be_written_is_refused_before_anything_is_measured(model: Path) -> None:
    done = baton("bench", "throughput", str(model), "--json", "/no/such/folder/result.json")
    assert done.returncode == 2
    assert "the folder /no/such/folder does not exist" in done.stderr


def test_the_version_is_the_packages() -> None:
    assert baton("--version").stdout == f"baton {version('baton')}\n"


def test_of_a_traceback_the_last_error_is_shown() -> None:
    message = (
        "The replica failed:\nTraceback (most recent call last):\n  File x\nbaton.WeightsError: no files;\ngive some"
    )
    assert last_error(message) == "no files;\ngive some", "errors of ours are shown without their class"
    assert last_error(f"{message}\nValueError: of another") == "ValueError: of another"
    assert last_error("waiting for resources") == "waiting for resources"


def test_ctrl_c_ends_a_recording_of_engines_early(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = EngineTrace("decode-1", "10.0.0.1", "/tmp/trace.json.gz", seconds=0.4)
    calls = []

    def ask(address: str, application: str, method: str, start: bool) -> list[EngineTrace]:
        calls.append(start)
        return [trace]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("baton.cluster.cli.ray_cluster.ask_directory", ask)
    monkeypatch.setattr("baton.cluster.cli.ray_cluster.leave", lambda: None)
    monkeypatch.setattr("baton.cluster.cli.main.time.sleep", interrupted)
    done = run_baton("profile", "--seconds", "60")
    assert (calls, done.returncode) == ([True, False], 0)
    assert "decode-1: 0.4 s" in done.stdout
