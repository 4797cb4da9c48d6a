"""What holds for all tests of a run, set before anything reads it.

One thread a process: several Ray workers and tests share few cores, and OpenMP teams that spin starve each other. Where
there is no GPU, Triton interprets kernels on CPU tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from member_pool import MemberPool

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max((marker.args[0] if marker.args else 1 for marker in item.iter_markers("gpu")), default=0)
    if needed:
        import torch

        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < needed:
            pytest.skip("needs a CUDA device" if needed == 1 else f"needs {needed} CUDA devices, there are {found}")


@pytest.fixture(scope="module")
def pool() -> Iterator[MemberPool]:
    """Processes that are members of groups; see `member_pool`."""
    from member_pool import MemberPool

    pool = MemberPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def machine_with_hosts() -> None:
    """Skips where this machine cannot make hosts (`multihost/hosts.py`); continuous integration must not."""
    from hosts import missing_here

    if why := missing_here():
        if os.environ.get("CI"):
            pytest.fail(f"continuous integration must not leave this out: {why}")
        pytest.skip(why)
