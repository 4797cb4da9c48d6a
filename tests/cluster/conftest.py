"""Makes pytest put this folder on the path, so that the folders below can import its helpers, and the reverse."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent / folder) for folder in ("balancers", "gateway")]
