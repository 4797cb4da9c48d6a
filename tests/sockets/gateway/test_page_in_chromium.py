"""The page at `/` in a browser: empty, busy and failing fleets, the playground, keys, themes, keyboard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from baton.cluster.contracts import Role

from ...helpers.chromium import PROGRAM, Tab
from ...helpers.gateway_service import Service
from .page_checks import WIDTHS, check_fit
from .page_fleets import busy, failing, list_gateway, load

pytestmark = [pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium"), pytest.mark.slow]

ANSWER = "the quick brown fox jumps over the lazy dog"
QUESTION = "where to?"
IS_WHOLE = "document.querySelector('#stop').disabled"
CONTROLS = ("skip", "key-button", "theme-button", "message", "send", "clear", "request-id")


async def ask(tab: Tab, question: str) -> None:
    await tab.evaluate("document.querySelector('#message').focus()")
    await tab.write(question)
    await tab.press("Enter", "\r")


async def test_a_busy_fleet_is_shown_with_its_latencies(start: Callable[..., Service], tab: Tab) -> None:
    service = busy(start)
    async with service.over_tcp() as url, load(service):
        await tab.open(url)
        await tab.until("document.querySelector('#verdict').dataset.level === 'good'")
        await tab.until("/ ms\\s+p50/.test(document.querySelector('[data-key=ttft]').innerText)")
        await tab.until("/ms/.test(document.querySelector('[data-key=itl] .value').innerText)")
        assert "4 engines, 1 gateway" in await tab.text("#verdict")
        engines = await tab.text("#engines")
        for engine in service.cluster.members:
            assert engine.record.engine_id in engines
        assert engines.count("ready") == 4
        assert "42 GB/s" in await tab.text("#handoffs")
        assert await tab.text("#errors") == "None."
        assert "192.0.2.200:8000" in await tab.text("#gateways")
        assert tab.faults == []


async def test_figures_equal_those_of_the_metrics(start: Callable[..., Service], tab: Tab) -> None:
    service = busy(start)
    async with service.over_tcp() as url:
        await tab.open(url)
        await tab.until("document.querySelector('#live').dataset.state === 'good'")
        for number in range(4):
            await service.complete([20 + number] * 40, max_tokens=8, ignore_eos=True)
        await tab.until("/of 4 answers/.test(document.querySelector('[data-key=failures]').innerText)")
        assert (await tab.text("[data-key=failures] .value")).strip() == "0"
        samples = await service.metrics()
        counts = {
            name.partition('le="')[2].partition('"')[0]: value
            for name, value in samples.items()
            if name.startswith("baton_time_to_first_token_seconds_bucket")
        }
        shown = await tab.evaluate(
            "(async () => { const { quantile } = await import('/page/series.js');"
            f" return [0.5, 0.99].map((share) => quantile(Object.entries({json.dumps(counts)}), share)); }})()"
        )
        text = await tab.evaluate(
            "(async () => { const { seconds } = await import('/page/format.js');"
            f" return {json.dumps(shown)}.map(seconds); }})()"
        )
        tile = await tab.text("[data-key=ttft]")
        assert all(each in tile for each in text), (text, tile)


async def test_durations_have_no_sixtieth_second(service: Service, tab: Tab) -> None:
    async with service.over_tcp() as url:
        await tab.open(url)
        shown = await tab.evaluate("import('/page/format.js').then(({ seconds }) => [150, 179.6, 200].map(seconds))")
        assert shown == ["2 min 30 s", "3 min 0 s", "3 min 20 s"]


async def test_quantiles_and_rates_equal_those_of_promql(start: Callable[..., Service], tab: Tab) -> None:
    service = start(Role.UNIFIED)
    async with service.over_tcp() as url:
        await tab.open(url)
        quantiles = await tab.evaluate(
            "import('/page/series.js').then(({ quantile }) => [0.5, 0.75, 0.99]"
            ".map((share) => quantile([['+Inf', 11], ['0.2', 10], ['0.1', 5]], share)))"
        )
        assert quantiles == pytest.approx([0.11, 0.165, 0.2])
        rises = await tab.evaluate(
            "import('/page/series.js').then(({ Increases, parseMetrics }) => {"
            " const seen = new Increases(100);"
            ' [7, 9, 3, 4].forEach((value, i) => seen.add(2 * i, parseMetrics(`x_total{a="b"} ${value}`)));'
            " const by = [...seen.by('x_total', 60, 'a')];"
            " return [seen.sum('x_total', 60), seen.rate('x_total', 60), seen.sum('x_total', 3), by];"
            " })"
        )
        assert rises == [6, 1, 4, [["b", 6]]]  # 2, then 3 of a new process, then 1


async def test_a_gateway_is_shown_with_its_address(start: Callable[..., Service], tab: Tab) -> None:
    service = start(Role.UNIFIED)
    async with service.over_tcp() as url:
        await tab.open(url)
        gateways = [{"host": host, "node_ip": "192.0.2.1", "port": 8000} for host in ("127.0.0.1", "0.0.0.0", "::1")]
        shown = await tab.evaluate(
            f"import('/page/fleet.js').then(({{ addressOf }}) => {json.dumps(gateways)}.map(addressOf))"
        )
        assert shown == ["127.0.0.1:8000", "192.0.2.1:8000", "[::1]:8000"]


async def test_an_empty_fleet_says_so_and_a_request_shows_why_it_failed(
    start: Callable[..., Service], tab: Tab
) -> None:
    service = start(capacity_timeout_s=0.1)
    list_gateway(service)
    async with service.over_tcp() as url:
        await tab.open(url)
        await tab.until("document.querySelector('#verdict strong').innerText === 'No engines'")
        assert await tab.text("#engines") == ""
        await ask(tab, QUESTION)
        await tab.until("document.querySelector('.failure')")
        assert (await tab.text(".failure")).startswith("503: ")
        service.cluster.start(Role.UNIFIED)
        await tab.until("document.querySelector('#verdict strong').innerText.startsWith('Serving')")


async def test_a_failing_fleet_says_what_fails(start: Callable[..., Service], tab: Tab) -> None:
    service = failing(start)
    async with service.over_tcp() as url, load(service, 4):
        await tab.open(url)
        await tab.until("document.querySelector('#verdict strong').innerText === 'Serving, with failures'")
        problems = await tab.text("#problems")
        assert "decode-3 is listed, and this gateway does not reach it." in problems
        assert "decode-2 reads from prefill-0 slowly" in problems
        assert "500 /v1/completions" in await tab.text("#errors")
        assert "lost" in await tab.text("#engines")
        assert int(await tab.text("[data-key=failures] .value")) > 0


async def test_if_the_gateway_is_gone_the_page_shows_the_age_of_its_figures(
    start: Callable[..., Service], tab: Tab
) -> None:
    service = busy(start)
    async with service.over_tcp() as url:
        await tab.open(url)
        await tab.until("document.querySelector('#live').innerText === 'live'")
    await tab.until("document.querySelector('#live').innerText === 'no answer'")
    assert " old." in await tab.text("#verdict")
    assert "prefill-0" in await tab.text("#engines")


async def test_an_answer_is_streamed_and_shows_where_it_ran(start: Callable[..., Service], tab: Tab) -> None:
    service = busy(start)
    service.script_chat(QUESTION, ANSWER)
    for engine in service.cluster.members:
        engine.step_s = 0.05
    async with service.over_tcp() as url:
        await tab.open(url)
        await tab.until("document.querySelector('#model').innerText === 'tiny'")
        await ask(tab, QUESTION)
        await tab.until("document.querySelector('.assistant .text').innerText.startsWith('the quick')")
        assert not await tab.evaluate(IS_WHOLE)  # the answer is not complete yet
        await tab.until(IS_WHOLE)
        assert await tab.text(".assistant .text") == ANSWER
        served = await tab.text(".served")
        assert "disaggregated" in served
        assert "→" in served
        assert "0 cached" in served
        await tab.click("[data-request]")
        timeline = await tab.text("#timeline")
        for stamp in ("admitted", "first_token", "decode_routed", "pulled", "last_token"):
            assert stamp in timeline
        first, second = await tab.evaluate("[...document.querySelectorAll('.served li')][1].innerText.split(' → ')")
        assert first.startswith("prefill-")
        assert second.startswith("decode-")
        await ask(tab, "and then?")
        await tab.until("document.querySelectorAll('.served').length === 2")
        assert await tab.evaluate("document.querySelectorAll('.turn').length") == 4
        assert tab.faults == []


async def test_the_timeline_of_any_request_is_shown_by_its_id(start: Callable[..., Service], tab: Tab) -> None:
    service = start(Role.PREFILL, Role.DECODE)
    body = {"model": "tiny", "prompt": "the fox", "max_tokens": 4, "n": 2}
    await service.http.post("/v1/completions", json=body, headers={"x-request-id": "theirs"})
    async with service.over_tcp() as url:
        await tab.open(url)
        for name, shown in (("theirs", "choice 2 of 2 choices"), ("nobodys", "No request with the id")):
            await tab.evaluate("document.querySelector('#request-id').value = ''")
            await tab.evaluate("document.querySelector('#request-id').focus()")
            await tab.write(name)
            await tab.press("Enter", "\r")
            await tab.until(f"document.querySelector('#timeline').innerText.includes({shown!r})")
            if name == "theirs":
                timeline = await tab.text("#timeline")
                assert all(text in timeline for text in ("/v1/completions", "200", "disaggregated", "decode_routed"))
        assert [fault for fault in tab.faults if "404" not in fault] == []


async def test_stop_ends_the_answer_in_the_engine(start: Callable[..., Service], tab: Tab) -> None:
    service = start(Role.UNIFIED)
    service.script_chat(QUESTION, ANSWER * 3)
    service.cluster.members[0].step_s = 0.1
    async with service.over_tcp() as url:
        await tab.open(url)
        await tab.until("document.querySelector('#model').innerText === 'tiny'")
        await ask(tab, QUESTION)
        await tab.until("document.querySelector('.assistant .text').innerText.startsWith('the')")
        await tab.click("#stop")
        await tab.until("document.querySelector('.assistant .note').innerText === 'Stopped.'")
        await service.cluster.settled()
        assert "stopped" in await tab.text("#requests")


async def test_the_page_asks_for_a_key_and_keeps_it_only_in_the_session(
    start: Callable[..., Service], tab: Tab
) -> None:
    service = start(Role.UNIFIED, api_keys=["right"])
    async with service.over_tcp() as url:
        await tab.open(url)
        await tab.until("document.querySelector('#verdict strong').innerText === 'An API key is needed'")
        assert await tab.evaluate("document.activeElement.id") == "key"
        assert await tab.text("#fleet") == await tab.text("#verdict"), "without a key there must be no empty panels"
        await tab.write("wrong")
        await tab.press("Enter", "\r")
        await tab.until("document.querySelector('#verdict strong').innerText === 'The API key is not valid'")
        await tab.write("right")
        await tab.press("Enter", "\r")
        await tab.until("document.querySelector('#verdict strong').innerText === 'Serving'")
        assert "Hand-offs" in await tab.text("#fleet")
        assert await tab.evaluate("JSON.stringify({...localStorage})") == "{}"
        assert await tab.evaluate("document.cookie") == ""
        assert await tab.evaluate("Object.values({...sessionStorage}).join()") == "right"


async def test_a_hidden_page_sends_no_requests(start: Callable[..., Service], tab: Tab) -> None:
    service = start(Role.UNIFIED)
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    tell = " document.dispatchEvent(new Event('visibilitychange'));"
    async with service.over_tcp() as url:
        await tab.open(url)
        await tab.until("document.querySelector('#live').innerText === 'live'")
        await tab.evaluate(hide % "true" + tell)
        await tab.until("document.querySelector('#live').innerText === 'paused'")
        await asyncio.sleep(0.2)  # let pending requests end
        asked = 'baton_http_responses_total{route="/v1/cluster/ranks",status="200"}'
        before = (await service.metrics())[asked]
        await asyncio.sleep(2.5)
        assert (await service.metrics())[asked] == before
        await tab.evaluate(hide % "false" + tell)
        await tab.until("document.querySelector('#live').innerText === 'live'")
        assert (await service.metrics())[asked] > before


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_the_page_fits_each_width_in_both_themes(start: Callable[..., Service], tab: Tab, theme: str) -> None:
    service = failing(start)
    async with service.over_tcp() as url:
        await tab.look(theme=theme)
        await tab.open(url)
        await tab.until("document.querySelector('#engines table')")
        dark = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, dark.strip("rgb()").split(","))) < 200) == (theme == "dark")
        for width in WIDTHS:
            await check_fit(tab, width, theme)
            shown = "[...document.querySelectorAll('#fleet, #playground')].filter((e) => e.offsetParent).length"
            assert await tab.evaluate(shown) == (2 if width == WIDTHS[0] else 1)


async def test_the_chosen_theme_is_kept(start: Callable[..., Service], tab: Tab) -> None:
    service = start(Role.UNIFIED)
    async with service.over_tcp() as url:
        await tab.open(url)
        for _ in range(2):
            await tab.click("#theme-button")
        assert await tab.evaluate("document.documentElement.dataset.theme") == "dark"
        await tab.open(url)
        await tab.until("document.documentElement.dataset.theme === 'dark'")


async def test_every_control_has_a_name_and_can_be_reached_by_keyboard(start: Callable[..., Service], tab: Tab) -> None:
    service = start(Role.UNIFIED)
    async with service.over_tcp() as url:
        await tab.open(url)
        await tab.until("document.querySelector('#live').innerText === 'live'")
        reached: list[str] = []
        while reached[-1:] != ["request-id"] and len(reached) < 20:
            await tab.press("Tab")
            reached.append(await tab.evaluate("document.activeElement.id || document.activeElement.className"))
            assert await tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", reached
        assert [name for name in reached if name in CONTROLS] == list(CONTROLS)
        tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
        controls = [node for node in tree if node.get("role", {}).get("value") in ("button", "textbox", "link")]
        assert len(controls) >= 6
        assert all(node["name"]["value"] for node in controls), controls
