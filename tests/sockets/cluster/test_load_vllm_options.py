"""`baton bench serve` with command lines of `vllm bench serve`."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from baton.cluster.cli.bench import bench_app
from baton.cluster.cli.load import client
from baton.cluster.cli.load.options import REFUSED

DEMO = Path(__file__).parents[3] / "configs/demo/model"
TRACE = {"engine_id": "engine", "path": "/tmp/trace"}


class Asked:
    """Recorded requests in order: routes, and headers and bodies of those that generate."""

    def __init__(self) -> None:
        self.port = 0
        self.routes: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.num_refused = 0  # so many of the next requests get a 503
        self.profile_status = 200


class Server(BaseHTTPRequestHandler):
    """A server with OpenAI's generating routes and the profiler's routes."""

    asked: Asked

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "org/theirs"}]}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.routes.append(self.path)
        if self.path in ("/start_profile", "/stop_profile"):
            said = {"data": [TRACE]} if self.path == "/stop_profile" else {}
            if self.asked.profile_status != 200:
                said = {"error": {"message": "no admin"}}
            self._answer(self.asked.profile_status, json.dumps(said).encode())
        elif self.asked.num_refused > 0:
            self.asked.num_refused -= 1
            self._answer(503, b"loading")
        else:
            fields = json.loads(body)
            self.asked.bodies.append(fields)
            self.asked.headers.append(dict(self.headers))
            choice = {"delta": {"content": "a"}} if "messages" in fields else {"text": "a"}
            chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, **choice}]}] * fields["max_tokens"]
            chunks.append({"choices": [], "usage": {"completion_tokens": fields["max_tokens"], "prompt_tokens": 16}})
            self._answer(200, b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def asked() -> Iterator[Asked]:
    found = Asked()
    handler = type("Handler", (Server,), {"asked": found})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        found.port = server.server_port
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def bench(asked: Asked, words: str, *more: str) -> Result:
    """Run the command with three short requests."""
    short = "--num-prompts 3 --random-input-len 16 --random-output-len 4 --disable-tqdm"
    where = f"--host 127.0.0.1 --port {asked.port} --tokenizer {DEMO}"
    return CliRunner().invoke(bench_app, ["serve", *f"{where} {short} {words}".split(), *more], env={"COLUMNS": "200"})


def said(result: Result) -> str:
    return re.sub(r"\s+", " ", re.sub("[│╭╮╰╯─]", " ", result.output))


def test_a_command_line_of_vllm_works_as_it_is(asked: Asked, tmp_path: Path) -> None:
    done = bench(
        asked,
        "--backend vllm --endpoint /v1/completions --model org/theirs --served-model-name theirs --dataset-name random"
        " --request-rate inf --max-concurrency 2 --num-warmups 1 --seed 3 --ignore-eos --logprobs 2 --temperature 0"
        " --goodput ttft:50000 e2el:50000 --metadata version=0.3 tp=1 --header x-a=1 x-b=2 --skip-chat-template"
        " --percentile-metrics ttft,e2el --metric-percentiles 50,99 --save-result --save-detailed --label here",
        *("--extra-body", '{"top_k": 3}', "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"),
    )
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "new/r.json").read_text())
    assert (result["completed"], result["failed"], result["model_id"], result["label"]) == (3, 0, "theirs", "here")
    assert (result["version"], result["tp"]) == ("0.3", "1")
    assert result["request_goodput"] == result["request_throughput"]
    assert {name for name in result if re.match(r"p[0-9]+_", name)} == {
        *("p50_ttft_ms", "p99_ttft_ms", "p50_e2el_ms", "p99_e2el_ms")
    }
    assert "mean_itl_ms" in result
    assert [len(result[name]) for name in ("ttfts", "itls", "latencies", "input_lens")] == [3] * 4
    assert asked.routes == ["/v1/completions"] * 4
    assert {(each["model"], each["top_k"], each["logprobs"], each["ignore_eos"]) for each in asked.bodies} == {
        ("theirs", 3, 2, True)
    }
    assert {(each["x-a"], each["x-b"]) for each in asked.headers} == {("1", "2")}


def test_chats_are_asked_by_vllms_older_name_of_the_backend(asked: Asked) -> None:
    words = "--endpoint-type openai-chat --endpoint /v1/chat/completions"
    done = bench(asked, words, "--chat-template-kwargs", '{"enable_thinking": false}')
    assert done.exit_code == 0, done.output
    assert set(asked.routes) == {"/v1/chat/completions"}
    assert {each["model"] for each in asked.bodies} == {"org/theirs"}
    assert all(each["chat_template_kwargs"] == {"enable_thinking": False} for each in asked.bodies)


def test_a_result_is_named_after_its_run_and_kept_beside_others(asked: Asked, tmp_path: Path) -> None:
    for words in ("--max-concurrency 2", "--label mine --request-rate 50", "--label a/../b"):
        done = bench(asked, f"{words} --save-result --result-dir {tmp_path}")
        assert done.exit_code == 0, done.output
    names = sorted(re.sub("[0-9]{8}-[0-9]{6}", "DATE", file.name) for file in tmp_path.iterdir())
    assert names == [
        "a_.._b-infqps-theirs-DATE.json",
        "mine-50qps-theirs-DATE.json",
        "openai-infqps-concurrency2-theirs-DATE.json",
    ]


def test_results_are_appended_and_shown_side_by_side(asked: Asked, tmp_path: Path) -> None:
    file, page = tmp_path / "all.json", tmp_path / "page.html"
    for label in ("one", "two"):
        words = f"--append-result --result-dir {tmp_path} --result-filename all.json --label {label}"
        assert bench(asked, words).exit_code == 0
    assert [json.loads(line)["label"] for line in file.read_text().splitlines()] == ["one", "two"]
    assert CliRunner().invoke(bench_app, ["report", str(file), "-o", str(page)]).exit_code == 0
    assert all(f">{label}<" in page.read_text() for label in ("one", "two"))


def test_a_file_that_cannot_be_written_is_told_and_the_result_is_printed(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "r.json").mkdir()
    done = bench(asked, f"--save-result --result-dir {tmp_path} --result-filename r.json")
    assert (done.exit_code, json.loads(done.stdout)["completed"]) == (1, 3)
    assert "--save-result: " in said(done)


def test_engines_are_recorded_during_the_run_without_its_warmups(asked: Asked) -> None:
    done = bench(asked, "--profile --num-warmups 2")
    assert done.exit_code == 0, done.output
    assert asked.routes == [*["/v1/completions"] * 2, "/start_profile", *["/v1/completions"] * 3, "/stop_profile"]
    assert json.loads(done.stdout)["traces"] == [TRACE]


def test_a_recording_that_is_refused_ends_the_command(asked: Asked) -> None:
    asked.profile_status = 403
    done = bench(asked, "--profile")
    assert done.exit_code == 1
    assert "--profile: " in said(done)
    assert "says 403" in said(done)
    assert "no admin" in said(done)


def test_it_waits_until_the_server_is_ready(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "READY_PERIOD_S", 0.01)
    asked.num_refused = 3
    done = bench(asked, "--ready-check-timeout-sec 60 --num-warmups 0")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["failed"] == 0
    assert len(asked.routes) == 3 + 1 + 3
    asked.num_refused = 10**6
    done = bench(asked, "--ready-check-timeout-sec 0.1")
    assert done.exit_code == 1
    assert "was not ready after 0.1 s: loading" in said(done)


def test_requests_have_ids_of_their_run_if_asked(asked: Asked) -> None:
    assert bench(asked, "--request-id-prefix run-7- --num-warmups 1").exit_code == 0
    warmup, *ids = [each.get("x-request-id") for each in asked.headers]
    assert warmup is None
    assert sorted(map(str, ids)) == ["run-7-0", "run-7-1", "run-7-2"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", REFUSED)
def test_options_that_cannot_work_are_refused_with_the_reason(asked: Asked, option: str) -> None:
    for words in (option, f"{option}=1"):
        done = bench(asked, words)
        assert (done.exit_code, asked.routes) == (2, [])
        assert f"{option}: {REFUSED[option]}" in said(done)


@pytest.mark.parametrize(("words", "why"), [("--hf-split train", "--hf-split"), ("--dataset-name hf", "hf")])
def test_what_is_unknown_is_named(asked: Asked, words: str, why: str) -> None:
    done = bench(asked, words)
    assert (done.exit_code, asked.routes) == (2, [])
    assert why in said(done)


def test_a_list_without_a_value_is_refused(asked: Asked) -> None:
    for words in ("--goodput --metadata a=1", "--metadata a=1 --goodput"):
        done = bench(asked, words)
        assert (done.exit_code, asked.routes) == (2, [])
        assert "--goodput needs a value" in said(done)
