"""Error messages about files that a model's folder lacks."""

from __future__ import annotations

import os
from pathlib import Path

FETCH_AGAIN = "fetch it again (`hf download NAME --local-dir FOLDER` gets what is missing)"


def absent_file(file: Path) -> str:
    """Return the name of a missing file; if it is a dangling link, also where that leads."""
    return f"{file.name} (a link to {os.readlink(file)}, where nothing is)" if file.is_symlink() else file.name
