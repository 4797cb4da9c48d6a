"""With this file here, pytest lets tests import this folder's helpers and those of `multihost`."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("multihost", "cluster")]
