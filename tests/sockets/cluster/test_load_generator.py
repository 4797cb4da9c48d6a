"""`baton bench serve` against servers that have only OpenAI's routes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.cli.load.client import ServerUnfit, measure
from baton.cluster.cli.load.options import ServeLoad
from baton.cluster.cli.load.requests import ALPHABET
from baton.engine.text import Tokenizer

PREFIX = "/llm"
DEMO = Path(__file__).parents[3] / "configs/demo/model"


class OnlyCompletions(BaseHTTPRequestHandler):
    """A server that streams `max_tokens` events, and records requests. It is behind a proxy with other services."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        if self._has("/v1/models"):
            self._answer(b'{"data": [{"id": "theirs"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._has("/v1/completions"):
            return
        self.asked.append(body)
        chunks = [{"choices": [{"index": 0, "text": "a"}]}] * body["max_tokens"]
        chunks.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        if body.get("baton_timeline") and body["model"] == "tells":
            parts = [{"stamp": "first_token", "at_s": 0.25, "part_s": 0.25}, {"stamp": "failed", "part_s": 1.0}]
            drafts = {"num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 3}
            parts.append({"stamp": "failed", "part_s": 0.5})
            chunks[-1]["baton_timeline"] = [{"latency_s": 3.0, "parts": parts, **drafts}]
        self._answer(b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks))

    def _has(self, route: str) -> bool:
        if self.path != PREFIX + route:
            self.send_error(404 if self.path.startswith(PREFIX + "/") else 403)
        return self.path == PREFIX + route

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def their_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (OnlyCompletions,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}{PREFIX}", asked
        server.shutdown()
        thread.join()


def load(url: str, **changed: Any) -> ServeLoad:
    fixed: dict[str, Any] = {"model": None, "api_key": None, "num_prompts": 3, "input_len": 16, "output_len": 4}
    pace: dict[str, Any] = {"request_rate": 0.0, "max_concurrency": 2, "num_warmups": 1, "seed": 0}
    return ServeLoad(url=url, **{**fixed, **pace, **changed})


def test_a_server_without_tokenize_is_loaded_with_tokens_of_a_models_folder(
    their_server: tuple[str, list[dict[str, Any]]],
) -> None:
    url, asked = their_server
    result = measure(load(url, tokenizer=str(DEMO), temperature=1.0))
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (3, 0, 12)
    plain = set(Tokenizer.from_folder(DEMO).encode(ALPHABET, add_special_tokens=False))
    assert all(len(body["prompt"]) == 16 and plain.issuperset(body["prompt"]) for body in asked)
    assert {body["temperature"] for body in asked} == {1.0}


def test_a_server_without_tokenize_is_refused_with_the_option_that_helps(
    their_server: tuple[str, list[dict[str, Any]]],
) -> None:
    with pytest.raises(ServerUnfit, match=r"(?s)/tokenize with status 404.*--tokenizer"):
        measure(load(their_server[0]))


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_path_of_the_url_is_a_prefix_of_every_route(
    their_server: tuple[str, list[dict[str, Any]]], ending: str
) -> None:
    url, asked = their_server
    assert measure(load(url + ending, tokenizer=str(DEMO)))["completed"] == 3
    assert len(asked) == 4, "with the warm-up"


@pytest.mark.parametrize("url", ["localhost:8000", "/llm", "http://"])
def test_a_url_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(ServerUnfit, match=f"^{url}: "):
        measure(load(url))


def test_a_folder_without_a_tokenizer_is_refused_by_name(
    their_server: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    with pytest.raises(ServerUnfit, match=str(tmp_path)):
        measure(load(their_server[0], tokenizer=str(tmp_path)))


def test_parts_of_answers_are_told_as_medians_where_the_server_tells_them(
    their_server: tuple[str, list[dict[str, Any]]],
) -> None:
    url, _ = their_server
    asks = load(url, tokenizer=str(DEMO), timeline=True, model="tells")
    told = measure(asks)
    assert told["median_parts_ms"] == {"first_token": 250.0, "failed": 1500.0}
    drafts = {name.removeprefix("spec_decode_"): told[name] for name in told if name.startswith("spec_decode_")}
    counts = {"num_drafts": 6, "draft_tokens": 24, "accepted_tokens": 9}
    assert drafts == {**counts, "acceptance_rate": 37.5, "acceptance_length": 2.5}
    with pytest.raises(ServerUnfit, match="leave --timeline out"):
        measure(load(url, tokenizer=str(DEMO), timeline=True))


def test_servers_are_asked_for_timelines_only_where_somebody_wants_them(
    their_server: tuple[str, list[dict[str, Any]]],
) -> None:
    url, asked = their_server
    told = measure(load(url, tokenizer=str(DEMO)))
    assert "median_parts_ms" not in told
    assert "spec_decode_num_drafts" not in told
    assert not [body for body in asked if "baton_timeline" in body]
