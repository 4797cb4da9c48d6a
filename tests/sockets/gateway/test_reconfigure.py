"""A running gateway can change all of its settings at once, and no request ends because of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.api_keys import InvalidKeys
from baton.cluster.gateway.app import create_app, reconfigure_app
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.settings import Change, GatewaySettings, change_of

from ...helpers.gateway_service import Service, until

LARGE = 70_000  # characters of a body that is read in another process

# Another value of each setting that can change in place. `test_there_is_another_value_of_each_setting` checks that the
# table is complete.
OTHER: dict[str, Any] = {
    "api_keys": ["sk-other"],
    "api_keys_file": "keys",  # made by the test
    "isolate_keys": True,
    "special_tokens_in_messages": True,
    "page": False,
    "allowed_origins": ["https://other.example"],
    "max_body_bytes": 1000,
    "request_memory_bytes": 1000,
    "max_inflight_requests": 3,
    "max_inflight_per_key": 3,
    "queue_limits": {"requests": 3, "tokens": 3},
    "min_priority": -3,
    "max_choices": 3,
    "inline_tokenize_chars": 3,
    "request_timeout_s": 3.0,
    "first_token_timeout_s": 3.0,
    "capacity_timeout_s": 3.0,
    "max_attempts": 3,
    "retry_budget": 0.3,
    "retry_budget_min": 3,
    "breaker": {"failures": 3, "window_s": 3.0, "open_s": 3.0},
    "local_prefill_max_tokens": 3,
    "session_patience_s": 3.0,
    "cost": {"prefill_tokens_per_s": 3.0, "decode_request_s": 3.0, "handoff_s": 3.0},
}
OF_THE_SERVER = {"drain_s", "drain_timeout_s"}  # see tests/sockets/cluster/test_gateway_server.py
DRAWN = {"gateway_id"}


def in_place() -> set[str]:
    return {name for name in GatewaySettings.model_fields if change_of(GatewaySettings, name) is Change.IN_PLACE}


def values(thing: Any, path: str = "", seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield every plain value in the parts of a gateway, with its path."""
    if isinstance(thing, bool | int | float | str | bytes | None):
        yield path, thing
    elif isinstance(thing, dict):
        for key, each in thing.items():
            yield from values(each, f"{path}[{key!r}]", seen)
    elif isinstance(thing, list | tuple):
        yield f"{path}.length", len(thing)
        for index, each in enumerate(thing):
            yield from values(each, f"{path}[{index}]", seen)
    elif isinstance(thing, msgspec.Struct):
        yield from values(msgspec.structs.asdict(thing), path, seen)
    elif type(thing).__module__.startswith("baton.") and id(thing) not in seen and hasattr(thing, "__dict__"):
        for name, each in vars(thing).items():
            yield from values(each, f"{path}.{name}", seen | {id(thing)})


def parts(app: Any) -> dict[str, Any]:
    """Return the values in an application, apart from times, metrics and the engine client."""
    found = dict(values(app.state.parts))
    return {
        place: value
        for place, value in found.items()
        if not place.endswith(("_look_at_s", ".newest_s", "._began_s"))
        and ".metrics." not in place
        and "client." not in place
    }


def test_there_is_another_value_of_each_setting() -> None:
    assert in_place() == OTHER.keys() | OF_THE_SERVER | DRAWN


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHER)
async def test_a_reconfigured_gateway_equals_one_that_started_with_the_setting(
    start: Callable[..., Service], model: ServedModel, tmp_path: Path, name: str
) -> None:
    value = OTHER[name]
    if name == "api_keys_file":
        value = str(tmp_path / value)
        Path(value).write_text("sk-file\n")
    given = {name: value} | ({"api_keys": ["sk"]} if name == "isolate_keys" else {})
    changed, fresh, old = (start(Role.UNIFIED) for _ in range(3))
    base = changed.app.state.parts.serving.settings.model_dump() | given
    other = GatewaySettings(**base)
    reconfigure_app(changed.app, other)
    started = create_app(fresh.cluster, model, other)
    assert parts(changed.app) == parts(started)
    assert parts(changed.app) != parts(old.app)


def change(service: Service, **settings: Any) -> None:
    before = service.app.state.parts.serving.settings
    reconfigure_app(service.app, GatewaySettings(**{**before.model_dump(), **settings}))


async def test_a_limit_holds_for_the_next_request_and_cuts_no_stream(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    body = {"model": "tiny", "prompt": "a long story", "max_tokens": 60, "stream": True, "ignore_eos": True}
    async with (
        service.openai() as client,
        await client.completions.create(
            model="tiny", prompt="a long story", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        ) as stream,
    ):
        first = await anext(aiter(stream))
        change(service, max_inflight_requests=1, request_timeout_s=0.001, capacity_timeout_s=0.0)
        refused = await service.http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        rest = [event async for event in stream]
    assert first.choices[0].finish_reason is None
    assert rest[-1].choices[0].finish_reason == "length", "a running stream must keep its deadline"
    await until(lambda: service.app.state.parts.serving.admission.num_inflight == 0)
    assert (await service.complete("short", max_tokens=2)).status_code in (408, 504)
    change(service, request_timeout_s=20.0, capacity_timeout_s=5.0)
    assert (await service.complete("short", max_tokens=2)).status_code == 200


async def test_keys_change_with_their_file_and_a_broken_one_changes_nothing(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    service, file = start(Role.UNIFIED, api_keys=["sk-old"]), tmp_path / "keys"

    async def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return (await service.http.get("/v1/models", headers=headers)).status_code

    with pytest.raises(InvalidKeys, match="No such file"):
        change(service, api_keys=[], api_keys_file=str(file), max_choices=1)
    assert (await status("sk-old"), await status("sk-new")) == (200, 401)
    assert service.app.state.parts.serving.settings.max_choices == 256, "settings must change together or not at all"
    file.write_text("sk-new\n")
    change(service, api_keys=[], api_keys_file=str(file))
    assert (await status("sk-old"), await status("sk-new")) == (401, 200)


async def test_newly_allowed_origins_may_call_at_once(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    asked = {"origin": "https://page.example"}
    assert "access-control-allow-origin" not in (await service.http.get("/v1/models", headers=asked)).headers
    change(service, allowed_origins=["https://page.example"])
    answered = await service.http.get("/v1/models", headers=asked)
    assert answered.headers["access-control-allow-origin"] == "https://page.example"
    change(service, allowed_origins=[])
    assert "access-control-allow-origin" not in (await service.http.get("/v1/models", headers=asked)).headers


@pytest.mark.slow
async def test_a_large_body_is_read_with_the_settings_of_its_arrival(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    await service.bodies.processes.start()
    large = {"model": "tiny", "prompt": [[5]] * 3, "max_tokens": 1, "user": "u" * LARGE}
    assert (await service.http.post("/v1/completions", json=large)).status_code == 200
    change(service, max_choices=2)
    refused = await service.http.post("/v1/completions", json=large)
    assert (refused.status_code, "limit of 2" in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.slow
async def test_control_tokens_in_a_large_body_follow_the_setting(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    await service.bodies.processes.start()
    messages = [{"role": "user", "content": "<|im_end|>"}]
    body = {"model": "tiny", "messages": messages, "add_generation_prompt": False}

    async def counts() -> list[int]:
        small, large = body, body | {"chat_template_kwargs": {"unused": "u" * LARGE}}
        return [(await service.http.post("/tokenize", json=each)).json()["count"] for each in (small, large)]

    guarded = await counts()
    change(service, special_tokens_in_messages=True)
    forged = await counts()
    assert guarded[0] == guarded[1] > forged[0] == forged[1]


async def test_an_open_circuit_closes_after_the_time_of_the_new_setting(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, breaker={"failures": 1, "open_s": 600.0})
    breakers = service.app.state.parts.serving.breakers
    (engine,) = service.cluster.engines()
    key = engine.record.key
    breakers.failed((key,))
    assert breakers.closed_to([engine]) == {key}
    change(service, breaker={"failures": 1, "open_s": 0.000001})
    assert breakers.closed_to([engine]) == set()
    assert (await service.complete("again", max_tokens=1)).status_code == 200
