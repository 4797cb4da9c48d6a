"""A headless Chromium that a test drives over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
START_S = 30.0
WAIT_S = 20.0
# Root gets no sandbox. The other flags keep the browser from sending network requests of its own.
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
)


class Tab:
    """A page in the browser, or the browser itself.

    `faults` are the errors that it reported: exceptions, refused loads, failed requests.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.faults: list[str] = []
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, WAIT_S)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited. Fails if it throws."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true; fail with the page's text if that takes too long."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not await self.evaluate(f"Boolean({expression})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never: {expression}\n{await self.text('body')}\n{self.faults}") from None

    async def text(self, selector: str) -> str:
        """Return the text of an element as it is shown."""
        return str(await self.evaluate(f"document.querySelector({selector!r}).innerText"))

    async def click(self, selector: str) -> None:
        """Click the middle of an element, as a mouse does."""
        box = await self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    async def press(self, key: str, text: str = "") -> None:
        code = {"Enter": 13, "Tab": 9, "Escape": 27}.get(key, 0)
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, text=text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def look(self, *, width: int = 1440, height: int = 900, theme: str = "light") -> None:
        """Set the size of the window, and the theme that the system asks for."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    async def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if (answer := self._answers.pop(told.get("id", 0), None)) is not None and not answer.done():
                if "error" in told:
                    answer.set_exception(AssertionError(told["error"]))
                else:
                    answer.set_result(told["result"])
            elif told.get("method") == "Runtime.exceptionThrown":
                self.faults.append(str(told["params"]["exceptionDetails"]))
            elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                entry = told["params"]["entry"]
                self.faults.append(f"{entry['text']} {entry.get('url', '')}")


class Browser:
    """A Chromium process. Each of its tabs has storage and a cache of its own."""

    def __init__(self, address: str) -> None:
        self._address = address

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """Open a tab, and close it with all that it has stored."""
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{self._address}/json/version") as response:
                own_url = (await response.json())["webSocketDebuggerUrl"]
            async with _connected(session, own_url) as itself:
                context = (await itself.call("Target.createBrowserContext"))["browserContextId"]
                page = await itself.call("Target.createTarget", url="about:blank", browserContextId=context)
                async with _connected(session, f"ws://{self._address}/devtools/page/{page['targetId']}") as tab:
                    yield tab
                await itself.call("Target.disposeBrowserContext", browserContextId=context)


@asynccontextmanager
async def _connected(session: aiohttp.ClientSession, url: str) -> AsyncIterator[Tab]:
    async with session.ws_connect(url, max_msg_size=0) as socket:
        tab = Tab(socket)
        try:
            yield tab
        finally:
            await tab.close()


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with its files in `folder`, and end it."""
    assert PROGRAM is not None
    folder.mkdir()
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PROGRAM, *OPTIONS, f"--user-data-dir={folder / 'data'}", "about:blank"],
            stderr=output,
            stdout=subprocess.DEVNULL,
        )
    try:
        yield Browser(_address(process, log))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Tab]:
    """Start a browser for one tab."""
    with browser(folder) as started:
        async with started.tab() as tab:
            yield tab


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + START_S
    while not (found := re.search(rb"DevTools listening on ws://([^/]+)/", log.read_bytes())):
        assert process.poll() is None, f"Chromium ended: {log.read_text(errors='replace')}"
        assert time.monotonic() < deadline_s, "Chromium does not start"
        time.sleep(0.02)
    return found[1].decode()
