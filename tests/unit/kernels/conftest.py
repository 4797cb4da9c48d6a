from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """Fill every uninitialized tensor with NaN, so that values that an op fails to write are noticed."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def triton_device() -> torch.device:
    """Return the device of a Triton kernel's tensors: a GPU, or a CPU that interprets it (float32 or float16 only)."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU here that torch cannot use")
    return torch.device("cpu")
