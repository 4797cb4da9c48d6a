"""With this file here, pytest lets the folders below import this folder's helpers; and the other way round."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "balancers"))
