"""Fixtures for tests of the gateway that open sockets."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ...helpers.chromium import Tab, chromium
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


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    """A browser tab, for the page at `/`."""
    async with chromium(tmp_path / "chromium") as tab:
        await tab.look(width=WIDTHS[0])
        yield tab
