"""The files of the page at `/`: types, headers, keys, and no addresses of other servers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.app import reconfigure_app
from baton.cluster.gateway.settings import GatewaySettings
from baton.cluster.gateway.web_page import FOLDER, page_files

from ...helpers.gateway_service import Service, check_refused

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PATHS = {"/": FOLDER / "index.html"} | {f"/page/{path.name}": path for path in sorted(FOLDER.iterdir())}


@pytest.mark.parametrize("path", PATHS)
async def test_every_file_is_served_unchanged(service: Service, path: str) -> None:
    answer = await service.http.get(path)
    assert answer.status_code == 200
    assert answer.content == PATHS[path].read_bytes()
    assert answer.headers["content-type"].partition(";")[0] == TYPES[PATHS[path].suffix]
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_browsers_cache_files_and_revalidate_them(service: Service) -> None:
    first = await service.http.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await service.http.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]


async def test_head_is_answered_and_other_methods_and_names_are_refused(service: Service) -> None:
    head = await service.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(page_files()["index.html"])
    check_refused(await service.http.post("/", json={}), 405, None)
    for path in (
        "/page/",
        "/page/none.js",
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/sub/main.js",
        "/index.html",
    ):
        assert "There is no" in check_refused(await service.http.get(path), 404, None)


async def test_the_page_needs_no_key_and_its_data_does(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, api_keys=["right"])
    for path in PATHS:
        assert (await service.http.get(path)).status_code == 200
    for path in ("/v1/cluster/ranks", "/server_info"):
        check_refused(await service.http.get(path), 401, None)
        assert (await service.http.get(path, headers={"authorization": "Bearer right"})).status_code == 200


async def test_a_setting_removes_the_page_while_the_gateway_serves(service: Service) -> None:
    reconfigure_app(service.app, GatewaySettings(page=False))
    for path in PATHS:
        check_refused(await service.http.get(path), 404, None)
    assert (await service.http.get("/docs")).status_code == 200
    reconfigure_app(service.app, GatewaySettings())
    assert (await service.http.get("/")).status_code == 200


def loaded(file: Path) -> set[str]:
    """Return the addresses that a file makes a browser load, or offers as a link."""
    text = file.read_text()
    found = re.findall(
        r"""(?:src|href|action)="([^"]*)"|url\(([^)]*)\)|@import|from "([^"]*)"|\bimport\("([^"]*)""", text
    )
    return {part for groups in found for part in groups if part}


def test_the_page_loads_only_its_own_files() -> None:
    names = set(page_files())
    assert {path.name for path in FOLDER.iterdir()} == names
    for file in FOLDER.iterdir():
        elsewhere = re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]+[^\s\"<>;]*", file.read_text())
        assert set(elsewhere) <= {"http://www.w3.org/2000/svg"}, file.name
        addresses = {each for each in loaded(file) if not each.startswith("#")} - {"docs"}
        assert {each.removeprefix("page/").removeprefix("./") for each in addresses} <= names, file.name
        assert not re.search(r"""\son\w+="|<style|\sstyle="|<script>""", file.read_text()), (
            f"{file.name}: no inline code"
        )


async def test_metrics_can_be_filtered_by_name(service: Service) -> None:
    await service.complete("the fox", max_tokens=2)
    text = (await service.http.get("/metrics?name[]=baton_choices_total&name[]=baton_engines")).text
    assert set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) == {"baton_choices_total", "baton_engines"}
    assert "baton_choices_total 1.0" in text
    assert (await service.http.get("/metrics?name[]=baton_none")).text == ""
    whole = (await service.http.get("/metrics")).text
    assert len(re.findall(r"^# TYPE ", whole, re.MULTILINE)) > 20


async def test_clients_that_allow_an_age_share_an_answer(service: Service) -> None:
    async def num_ranks(**headers: str) -> int:
        return len((await service.http.get("/v1/cluster/ranks", headers=headers)).json()["data"])

    allowed = {"cache-control": "max-age=60"}
    before = await num_ranks(**allowed)
    service.cluster.start(Role.DECODE)
    assert await num_ranks(**allowed) == before
    assert await num_ranks() == before + 1  # without a header a client gets the newest answer
    assert await num_ranks(**allowed) == before + 1
