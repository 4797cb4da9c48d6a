"""Checks of the layout of the page at `/`."""

from __future__ import annotations

from ...helpers.chromium import Tab

WIDTHS = (1440, 820, 390)  # desktop, tablet and phone
CUT = {  # elements -> a function that tells if one of them overflows its box
    ".tile dt, .tile .note": "(e) => e.scrollWidth > e.clientWidth",
    ".panel td": "(e) => e.scrollWidth > e.clientWidth + 1",
    ".panel table": "(e) => e.getBoundingClientRect().right > e.closest('.panel').getBoundingClientRect().right",
}


async def check_fit(tab: Tab, width: int, theme: str) -> None:
    """Fail if any element of either view overflows in a window of this width."""
    await tab.look(width=width, theme=theme)
    for view in ("fleet", "playground"):
        await tab.evaluate(f"document.querySelector('[data-show={view}]').click()")
        assert await tab.evaluate(f"document.documentElement.scrollWidth <= {width}"), (width, view)
        for parts, is_cut in CUT.items():
            cut = await tab.evaluate(
                f"[...document.querySelectorAll('{parts}')].filter({is_cut}).map((e) => e.outerHTML)"
            )
            assert cut == [], (width, view)
