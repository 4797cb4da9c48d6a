"""Files of a model's folder that are not there."""

from __future__ import annotations

import os
from pathlib import Path

FETCH_AGAIN = "fetch it again (`hf download NAME --local-dir FOLDER` gets what is missing)"


def absent_file(file: Path) -> str:
    """Return the name of a file that is not there, and where it would be if a link leads nowhere."""
    return f"{file.name} (a link to {os.readlink(file)}, where nothing is)" if file.is_symlink() else file.name
