"""Processes that fetch models from a server that speaks the Hub's API."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[3] / "configs/demo/model"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# The library reads its environment when it is imported, so each case has a process of its own.
FETCH = """
import json, logging, sys
logging.basicConfig(level="INFO", format="%(name)s %(message)s")
from baton.engine.hf_config import hub, hub_progress
from baton.engine.hf_config.errors import ModelError
hub_progress.LOG_S = 0.2
told = []
model, files, options = json.loads(sys.argv[1])
try:
    answer = {"folder": str(hub.model_folder(model, hub.Files[files], progress=told.append, **options)), "told": told}
except ModelError as error:
    answer = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(answer))
"""


@dataclass
class Fetched:
    folder: Path
    error: str
    message: str
    log: str
    told: list[str]  # of its progress

    @property
    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


@dataclass
class Client:
    """Fetches models in processes whose environment names a server."""

    cache: Path
    environment: dict[str, str]

    def start(self, model: str = "demo/model", files: str = "ALL", **options: Any) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", FETCH, json.dumps([model, files, options])]
        return subprocess.Popen(words, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def fetch(self, model: str = "demo/model", files: str = "ALL", **options: Any) -> Fetched:
        return finished(self.start(model, files, **options))


def finished(process: subprocess.Popen[str]) -> Fetched:
    output, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    answer = json.loads(output)
    return Fetched(
        Path(answer.get("folder", "")), answer.get("error", ""), answer.get("message", ""), log, answer.get("told", [])
    )
