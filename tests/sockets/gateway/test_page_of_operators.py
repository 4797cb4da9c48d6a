"""The page at `/` with an operator's key: after a confirmation it drains engines and ends requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.cluster.contracts import Role

from ...helpers.chromium import PROGRAM, Tab
from ...helpers.gateway_service import Service, check_refused, until
from ...helpers.recording_operator import RecordingOperator
from .page_checks import WIDTHS, check_fit

pytestmark = [pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium"), pytest.mark.slow]

CLIENT, ADMIN = "sk-one", "sk-ops"
FIRST = "[data-drain='0']"
IS_ASKED = "document.querySelector('#confirm').open"
LONG = {"model": "tiny", "prompt": "the fox", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def operator() -> RecordingOperator:
    return RecordingOperator()


@pytest.fixture
async def service(start: Callable[..., Service], operator: RecordingOperator, tmp_path: Path) -> Service:
    file = tmp_path / "keys"
    file.write_text(f"{CLIENT}\n{ADMIN} admin\n")
    return start(Role.PREFILL, Role.PREFILL, Role.DECODE, api_keys_file=str(file), operator=operator)


@asynccontextmanager
async def opened(service: Service, tab: Tab, key: str) -> AsyncIterator[None]:
    """Open the page, and enter a key."""
    async with service.over_tcp() as url:
        await tab.open(url)
        await tab.until("document.activeElement.id === 'key'")
        await tab.write(key)
        await tab.press("Enter", "\r")
        await tab.until("document.querySelector('#engines td')")
        yield


async def outcome(tab: Tab, place: str) -> tuple[str, str]:
    """Wait for the message about the result of an action, and return its level and text."""
    await tab.until(f"document.querySelector('{place}').innerText")
    return await tab.evaluate(f"document.querySelector('{place}').dataset.level"), await tab.text(place)


async def test_a_client_sees_no_controls_of_operators(service: Service, tab: Tab) -> None:
    async with opened(service, tab, CLIENT):
        assert await tab.evaluate("document.querySelectorAll('[data-drain]').length") == 0
        assert await tab.evaluate("document.querySelector('#abort').offsetParent === null")
        assert await tab.text("#key-button") == "Key"


async def test_without_keys_nobody_is_an_operator(start: Callable[..., Service], tab: Tab) -> None:
    async with start(Role.UNIFIED).over_tcp() as url:
        await tab.open(url)
        await tab.until("document.querySelector('#engines td')")
        assert await tab.evaluate("document.querySelectorAll('[data-drain]').length") == 0


async def test_a_key_without_the_right_hides_the_buttons(service: Service, tab: Tab) -> None:
    async with opened(service, tab, ADMIN):
        assert await tab.evaluate("document.querySelectorAll('[data-drain]').length") == 3
        assert await tab.text("#key-button") == "Admin key"
        await tab.click("#key-button")
        await tab.write(CLIENT)
        await tab.press("Enter", "\r")
        await tab.until("document.querySelectorAll('[data-drain]').length === 0")
        assert await tab.text("#key-button") == "Key"
        await tab.click("#key-button")
        await tab.click("#key-forget")
        await tab.until("document.querySelector('#abort').offsetParent === null")


async def test_an_engine_is_drained_after_a_confirmation(
    service: Service, tab: Tab, operator: RecordingOperator
) -> None:
    async with opened(service, tab, ADMIN):
        await tab.click(FIRST)
        await tab.until(IS_ASKED)
        assert await tab.text("#confirm-title") == "Drain prefill-0?"
        assert "No other prefill engine" not in await tab.text("#confirm-text")
        assert operator.drained == []
        await tab.click("#confirm-yes")
        said = await outcome(tab, "#drain-outcome")
        assert said == ("good", "The ranks 0, 1 drain: another group takes their place.")
        assert operator.drained == [0]
        assert not await tab.evaluate(IS_ASKED)
        assert [fault for fault in tab.faults if "401" not in fault] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("leave", ["#confirm-no", "Escape", "Enter"])
async def test_a_cancelled_confirmation_changes_nothing(
    service: Service, tab: Tab, operator: RecordingOperator, leave: str
) -> None:
    async with opened(service, tab, ADMIN):
        await tab.click(FIRST)
        await tab.until(IS_ASKED)
        if leave.startswith("#"):
            await tab.click(leave)
        else:
            await tab.press(leave, "\r" if leave == "Enter" else "")
        await tab.until(f"!{IS_ASKED}")
        assert (
            await tab.evaluate("document.activeElement.dataset.drain") == "0"
        )  # the focus must be on the same button again
        await asyncio.sleep(0.2)
        assert operator.drained == []
        assert await tab.text("#drain-outcome") == ""


async def test_an_engine_can_be_drained_by_keyboard(service: Service, tab: Tab, operator: RecordingOperator) -> None:
    async with opened(service, tab, ADMIN):
        await tab.evaluate(f'document.querySelector("{FIRST}").focus()')
        await tab.press("Enter", "\r")
        await tab.until("document.activeElement.id === 'confirm-no'")
        await tab.press("Tab")
        assert await tab.evaluate("document.activeElement.id") == "confirm-yes"
        assert await tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        await tab.press("Enter", "\r")
        await outcome(tab, "#drain-outcome")
        assert operator.drained == [0]


async def test_the_confirmation_warns_about_the_last_engine_of_its_kind(service: Service, tab: Tab) -> None:
    async with opened(service, tab, ADMIN):
        await tab.click("[data-drain='2']")
        await tab.until(IS_ASKED)
        assert "No other decode engine takes requests" in await tab.text("#confirm-text")
        await tab.click("#confirm-yes")
        level, text = await outcome(tab, "#drain-outcome")
        assert (level, text.startswith("Refused with 400: 'rank': there is no rank 2 now")) == ("bad", True)


async def test_an_engine_that_has_been_replaced_meanwhile_is_not_drained(
    service: Service, tab: Tab, operator: RecordingOperator
) -> None:
    async with opened(service, tab, ADMIN):
        await tab.click(FIRST)
        await tab.until(IS_ASKED)
        service.cluster.members[0].die()
        await tab.until(f'!document.querySelector("{FIRST}")')
        await tab.click("#confirm-yes")
        assert "was gone already" in (await outcome(tab, "#drain-outcome"))[1]
        assert operator.drained == []


async def test_after_a_right_was_revoked_the_page_says_so_and_hides_the_buttons(
    service: Service, tab: Tab, tmp_path: Path, operator: RecordingOperator
) -> None:
    async with opened(service, tab, ADMIN):
        (tmp_path / "keys").write_text(f"{CLIENT}\n{ADMIN}\n")
        await asyncio.sleep(1.1)  # the gateway checks the file once a second
        await tab.click(FIRST)
        await tab.until(IS_ASKED)
        await tab.click("#confirm-yes")
        level, text = await outcome(tab, "#drain-outcome")
        assert (level, text.startswith("Refused with 403: ")) == ("bad", True)
        await tab.until("document.querySelectorAll('[data-drain]').length === 0")
        assert operator.drained == []


async def test_a_request_is_ended_by_its_id_after_a_confirmation(service: Service, tab: Tab) -> None:
    for engine in service.cluster.members:
        engine.step_s = 0.05
    headers = {"authorization": f"Bearer {CLIENT}", "x-request-id": "theirs"}
    async with opened(service, tab, ADMIN):
        asked = asyncio.create_task(service.http.post("/v1/completions", json=LONG, headers=headers))
        await until(lambda: sum(view.outstanding for view in service.cluster.engines()))
        await tab.click("#abort")
        assert not await tab.evaluate(IS_ASKED)  # without an id there must be no confirmation
        await tab.evaluate("document.querySelector('#request-id').focus()")
        await tab.write("theirs")
        await tab.click("#abort")
        await tab.until(IS_ASKED)
        assert await tab.text("#confirm-title") == "End the request theirs?"
        assert not asked.done()
        await tab.click("#confirm-yes")
        assert await outcome(tab, "#abort-outcome") == ("good", "1 request has been ended.")
        check_refused(await asked, 403, None, "ended_by_operator")
        await tab.click("#abort")
        await tab.until(IS_ASKED)
        await tab.click("#confirm-yes")
        await tab.until("document.querySelector('#abort-outcome').dataset.level === 'bad'")
        assert (await outcome(tab, "#abort-outcome"))[1].startswith("Refused with 404: No request with the id 'theirs'")


@pytest.mark.exhaustive
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_the_operators_page_fits_each_width_in_both_themes(service: Service, tab: Tab, theme: str) -> None:
    async with opened(service, tab, ADMIN):
        for width in WIDTHS:
            await check_fit(tab, width, theme)
            await tab.evaluate("document.querySelector('[data-show=fleet]').click()")
            await tab.click(FIRST)
            await tab.until(IS_ASKED)
            box = await tab.evaluate(
                "(({left, right}) => [left, right])(document.querySelector('#confirm').getBoundingClientRect())"
            )
            assert 0 <= box[0] < box[1] <= width
            await tab.click("#confirm-no")
            await tab.until(f"!{IS_ASKED}")
