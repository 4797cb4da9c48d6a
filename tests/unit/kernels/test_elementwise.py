"""A value's result does not depend on where it lies in a tensor, nor on how long that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import elementwise

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sigmoid": (elementwise.sigmoid, torch.sigmoid),
    "silu": (elementwise.silu, functional.silu),
    "gelu": (elementwise.gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
}


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parts_give_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    function, definition = FUNCTIONS[name]
    x = (3 * torch.randn(130, 640, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = function(x)
    torch.testing.assert_close(whole, definition(x))
    for rows, columns in ((1, 1), (1, 8), (3, 9), (17, 33), (2, 640), (129, 639), (130, 256)):
        assert torch.equal(function(x[:rows, :columns]), whole[:rows, :columns])
    assert torch.equal(function(x[:, 1::2]), whole[:, 1::2])
    assert function(x[:0]).shape == (0, 640)
