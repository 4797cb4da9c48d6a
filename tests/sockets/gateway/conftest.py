"""Fixtures for tests of the gateway that open sockets."""

from collections.abc import AsyncIterator, Iterator

import pytest

from ...helpers.chromium import Browser, Tab, browser
from ...helpers.gateway_fixtures import disaggregated, grammars, model, responses, service, start, thinker, tokenizer
from .page_checks import WIDTHS
from .tool_calls import caller, tools

__all__ = [
    "caller",
    "disaggregated",
    "grammars",
    "model",
    "responses",
    "service",
    "start",
    "thinker",
    "tokenizer",
    "tools",
]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium") / "files") as started:
        yield started


@pytest.fixture
async def tab(chromium: Browser) -> AsyncIterator[Tab]:
    """A browser tab, for the page at `/`."""
    async with chromium.tab() as tab:
        await tab.look(width=WIDTHS[0])
        yield tab
