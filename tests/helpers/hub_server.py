"""A local server of the Hub's API for the models in some folders, with faults that tests can set.

    GET       /api/models/ORG/NAME/revision/REVISION    the commit of a branch or a tag
    GET       /api/models/ORG/NAME/tree/COMMIT          names, sizes and digests of the files
    HEAD GET  /ORG/NAME/resolve/COMMIT/FILE             a file or the rest of it (Range)

It serves the requests that `huggingface_hub` sends (1.31 to 2.4). Weight files are identified by their SHA-256, as on
the Hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
CHUNK = 64 * 1024


@dataclass
class HubServer:
    """The models that are served, their faults, and the requests that came."""

    url: str
    folders: dict[str, Path]  # by model name
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    token: str = ""  # without this token the server gives no file
    gated: bool = False  # only files need the token
    status: int = 0  # the status of every answer, unless 0
    break_after: list[int] = field(default_factory=list)  # each next download of weights breaks off after so many bytes
    missing_bytes: int = 0  # each weight file ends so many bytes early
    corrupt: bool = False  # change the last byte of weights
    bytes_per_s: float = 0.0  # the rate of a download; 0: unlimited
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range

    def downloads(self, suffix: str) -> list[str]:
        """Return the paths of the downloaded files with this ending, once for each download."""
        return [
            path
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path and path.endswith(suffix)
        ]


@contextlib.contextmanager
def hub_server(**folders: Path) -> Iterator[HubServer]:
    """Serve folders as models: `demo__model=path` becomes `demo/model`."""

    class Handler(_Handler):
        hub: HubServer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Handler.hub = HubServer(
        url=f"http://127.0.0.1:{server.server_address[1]}",
        folders={name.replace("__", "/"): folder for name, folder in folders.items()},
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Handler.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if not (path.startswith("/api/models/") or "/resolve/" in path):  # the library requests other paths, too
            self._refuse(404, "", "Not found")
            return
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        words = path.strip("/").removeprefix("api/models/").split("/")
        org, name, what, revision, *file = [*words, "", ""][: max(4, len(words))]
        with contextlib.suppress(ConnectionError):  # the test may have ended the client
            self._answer_about(f"{org}/{name}", what, revision, "/".join(file))

    def _answer_about(self, model: str, what: str, revision: str, file: str) -> None:
        folder, commit = self.hub.folders.get(model), self.hub.revisions.get(revision, revision)
        knows_token = not self.hub.token or self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if self.hub.status:
            self._refuse(self.hub.status, "", "out of order")
        elif folder is None or not (knows_token or self.hub.gated):
            self._refuse(404 if knows_token else 401, "RepoNotFound", "Repository not found")
        elif commit not in self.hub.revisions.values():
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif what == "revision":
            self._write_json({"id": model, "sha": commit, "siblings": [{"rfilename": each} for each in _files(folder)]})
        elif what == "tree":
            self._write_json([_entry(folder, each) for each in _files(folder)])
        elif not knows_token:
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
        elif file not in _files(folder):
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            self._write_file(folder / file, commit)

    def _write_file(self, file: Path, commit: str) -> None:
        data, is_lfs = file.read_bytes(), _is_lfs(file.name)
        size = len(data)
        if is_lfs and self.hub.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if is_lfs and self.command == "GET":
            data = data[: size - self.hub.missing_bytes]
        wanted = self.headers.get("Range", "")
        first = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_digest(file)}"')
        if is_lfs:
            self.send_header("X-Linked-Etag", f'"{_digest(file)}"')
            self.send_header("X-Linked-Size", str(size))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        if self.command == "GET":
            self._send(data[first:], self.hub.break_after.pop(0) if is_lfs and self.hub.break_after else len(data))

    def _send(self, data: bytes, most: int) -> None:
        """Send the data. After `most` bytes, break the connection."""
        for start in range(0, min(len(data), most), CHUNK):
            part = data[start : min(start + CHUNK, most)]
            self.wfile.write(part)
            if self.hub.bytes_per_s:
                time.sleep(len(part) / self.hub.bytes_per_s)
        if most < len(data):
            self.close_connection = True
            self.connection.close()

    def _write_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, name: str) -> dict[str, Any]:
    size = (folder / name).stat().st_size
    entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": "0" * 40}
    if _is_lfs(name):
        entry["lfs"] = {"oid": _digest(folder / name), "size": size, "pointerSize": 134}
    return entry


def _is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def _digest(file: Path) -> str:
    """Return the Hub's digest of a file: SHA-256 for weights, otherwise git's."""
    data = file.read_bytes()
    if _is_lfs(file.name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
