"""With this file here, pytest lets tests import this folder's helpers and those of `cluster`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "cluster"))
