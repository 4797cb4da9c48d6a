"""The page at `/`: the fleet live, a playground for chats, and the timelines of its requests.

    browser ── GET /, /page/{file} ──> the files of the folder `page`; no API key, since they say nothing of the fleet
            ── GET /v1/cluster/ranks, /metrics, /server_info, /health; POST /v1/chat/completions, with the user's key
            ── POST /v1/admin/drain, /v1/admin/abort, if /server_info says that this key may

The files are served as they are: there is no build step, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from .middleware import PAGE_FILES
from .openapi import cacheable
from .routes import READ

FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Browsers ask each time whether a file has changed, because files of two versions must not be mixed.
KEEP = "no-cache"
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@cache
def page_files() -> Mapping[str, bytes]:
    """Return the contents of the page's files by name."""
    return {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}


def add_page_routes(app: FastAPI, is_on: Callable[[], bool]) -> None:
    """Add `/` and the files of the page. While `is_on()` is false, they answer 404."""

    async def index(request: Request) -> Response:
        return answer(request, INDEX)

    async def file(request: Request) -> Response:
        return answer(request, request.path_params["file"])

    def answer(request: Request, name: str) -> Response:
        body = page_files().get(name) if is_on() else None
        if body is None:
            raise HTTPException(404)
        response = cacheable(request, body, MEDIA_TYPES[Path(name).suffix], KEEP)
        response.headers.update(HEADERS)
        return response

    app.router.routes += [Route("/", index, methods=READ), Route(PAGE_FILES + "{file}", file, methods=READ)]
