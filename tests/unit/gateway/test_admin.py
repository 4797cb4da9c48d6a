"""Routes for operators: required rights, effects, and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.api_keys import InvalidKeys, KeyRights, read_key_file

from ...helpers.gateway_service import Service, check_refused, until
from ...helpers.recording_operator import RecordingOperator

ROUTES = {
    "/v1/admin/drain": {"rank": 0},
    "/v1/admin/abort": {"request_id": "x"},
    "/start_profile": {},
    "/stop_profile": {},
}
ADMIN, CLIENT = {"authorization": "Bearer sk-ops"}, {"authorization": "Bearer sk-one"}
LONG = {"model": "tiny", "prompt": "the fox", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def operator() -> RecordingOperator:
    return RecordingOperator()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("sk-one\nsk-ops admin min_priority=-5\n")
    return file


@pytest.fixture
async def service(start: Callable[..., Service], keys: Path, operator: RecordingOperator) -> Service:
    return start(Role.UNIFIED, api_keys_file=str(keys), operator=operator)


async def post(service: Service, path: str, body: Any = None, headers: dict[str, str] | None = None) -> httpx.Response:
    return await service.http.post(path, json=body, headers=ADMIN if headers is None else headers)


@pytest.mark.parametrize("path", ROUTES)
async def test_only_keys_with_the_right_may_call_operator_routes(
    service: Service, start: Callable[..., Service], operator: RecordingOperator, path: str
) -> None:
    assert (await post(service, path, ROUTES[path], {})).status_code == 401
    said = check_refused(await post(service, path, ROUTES[path], CLIENT), 403, None, "not_admin")
    assert "api_keys_file" in said
    open_to_all = start(Role.UNIFIED, operator=operator)
    check_refused(await post(open_to_all, path, ROUTES[path], {}), 403, None, "not_admin")
    assert (operator.drained, operator.is_recording) == ([], False)


def test_rights_may_follow_a_key_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a admin\nsk-b admin min_priority=-3\nsk-c min_priority=-3 admin\nsk-d\n")
    both = KeyRights(-3, is_admin=True)
    assert read_key_file(str(file)) == {
        "sk-a": KeyRights(is_admin=True),
        "sk-b": both,
        "sk-c": both,
        "sk-d": KeyRights(),
    }
    for line in ("sk admin admin", "sk Admin", "sk admin min_priority=1", "sk min_priority=0 min_priority=0", "sk a"):
        file.write_text(line)
        with pytest.raises(InvalidKeys, match="the key in line 1") as refused:
            read_key_file(str(file))
        assert "sk" not in str(refused.value).removeprefix(f"gateway.api_keys_file: {file}")


async def test_a_drain_of_any_rank_drains_its_group(service: Service, operator: RecordingOperator) -> None:
    answer = await post(service, "/v1/admin/drain", {"rank": 1})
    assert (answer.status_code, answer.json(), operator.drained) == (200, {"ranks": [0, 1]}, [1])
    assert "there are: 0, 1" in check_refused(await post(service, "/v1/admin/drain", {"rank": 7}), 400, "rank")
    for body in ({}, {"rank": -1}, {"rank": "1"}, {"rank": True}, {"rank": 0, "group": "x"}, []):
        assert (await post(service, "/v1/admin/drain", body)).status_code == 400
    check_refused(await post(service, "/v1/admin/drain", {"rank": 0, "x": "y" * 5000}), 413, None)


@pytest.mark.slow
async def test_server_info_says_if_the_key_is_an_operators(service: Service, start: Callable[..., Service]) -> None:
    for headers, is_admin in ((CLIENT, False), (ADMIN, True)):
        assert (await service.http.get("/server_info", headers=headers)).json()["is_admin"] is is_admin
    assert (await start(Role.UNIFIED).http.get("/server_info")).json()["is_admin"] is False


async def test_a_trace_is_started_and_stopped(service: Service) -> None:
    check_refused(await post(service, "/stop_profile"), 409, None, "no_trace")
    begun = await post(service, "/start_profile")
    assert (begun.status_code, begun.json()["data"][0]["path"]) == (200, "/tmp/trace")
    ended = await post(service, "/stop_profile")
    trace = {"engine_id": "engine", "node_ip": "192.0.2.1", "path": "/tmp/trace", "seconds": 1.5, "size_bytes": 1000}
    assert ended.json() == {"data": [trace]}


async def test_without_a_directory_traces_are_refused_with_the_reason(
    start: Callable[..., Service], keys: Path
) -> None:
    service = start(Role.UNIFIED, api_keys_file=str(keys))
    for path in ("/start_profile", "/stop_profile"):
        check_refused(await post(service, path), 503, None, "no_directory")


async def test_a_request_is_ended_by_its_id(service: Service) -> None:
    for engine in service.cluster.members:
        engine.step_s = 0.02
    asked = asyncio.create_task(
        service.http.post("/v1/completions", json=LONG, headers={**CLIENT, "x-request-id": "mine"})
    )
    streamed = asyncio.create_task(
        service.http.post("/v1/completions", json=LONG | {"stream": True}, headers={**CLIENT, "x-request-id": "mine"})
    )
    await until(lambda: sum(view.outstanding for view in service.cluster.engines()) == 2)
    answer = await post(service, "/v1/admin/abort", {"request_id": "mine"})
    assert (answer.status_code, answer.json()) == (200, {"aborted": 2})
    check_refused(await asked, 403, None, "ended_by_operator")
    assert "ended_by_operator" in (await streamed).text
    assert "[DONE]" not in (await streamed).text
    await service.cluster.settled()
    check_refused(await post(service, "/v1/admin/abort", {"request_id": "mine"}), 404, "request_id", "unknown_request")


async def test_the_timeline_of_a_finished_request_is_shown_to_its_key_and_to_operators(service: Service) -> None:
    sent = LONG | {"max_tokens": 5, "n": 2}
    mine = {**CLIENT, "x-request-id": "mine"}
    await service.http.post("/v1/completions", json=sent, headers=mine)
    wrong = await service.http.post("/v1/completions", json=sent | {"n": -1}, headers=mine)
    assert wrong.status_code == 400
    for headers in (CLIENT, ADMIN):
        found = (await service.http.get("/v1/cluster/requests/mine", headers=headers)).json()["data"]
        assert [(each["status"], each["route"]) for each in found] == [
            (400, "/v1/completions"),
            (200, "/v1/completions"),
        ]
        assert [len(each["choices"]) for each in found] == [0, 2]
        assert found[1]["path"].startswith("unified")
        stamps = [part["stamp"] for part in found[1]["choices"][0]["parts"]]
        assert stamps[:3] == ["ingress", "admitted", "routed"]
        assert stamps[-1] == "last_byte"
    await service.http.post("/v1/completions", json=sent, headers={**ADMIN, "x-request-id": "theirs"})
    unseen = await service.http.get("/v1/cluster/requests/theirs", headers=CLIENT)
    check_refused(unseen, 404, "request_id", "unknown_request")
    assert (await service.http.get("/v1/cluster/requests/mine")).status_code == 401
