"""Linear layers over packed weights: against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.linear import Activation, Pointwise, RowNorm, gated_linear, linear, pack, reference

from .kernel_checks import assert_as_accurate

pytestmark = pytest.mark.exhaustive

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    result = linear(x, pack(weight), bias)
    exact = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_as_accurate(result, exact, reference.linear(x, weight, bias))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 13, 14, 15, 29, 168, 169, 400])
@pytest.mark.parametrize("with_bias", [False, True])
def test_any_number_of_tokens(dtype: torch.dtype, num_tokens: int, with_bias: bool, num_threads: int) -> None:
    weight, bias = torch.randn(100, 64).to(dtype), torch.randn(100).to(dtype)
    check(torch.randn(num_tokens, 64).to(dtype), weight, bias if with_bias else None)


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_columns", "depth"), [(1, 2), (31, 2), (32, 6), (33, 999), (999, 33), (5, 1), (64, 4096)])
def test_any_size_of_the_weight(dtype: torch.dtype, num_columns: int, depth: int) -> None:
    weight, bias = torch.randn(num_columns, depth).to(dtype), torch.randn(num_columns).to(dtype)
    check(torch.randn(17, depth).to(dtype), weight, bias)


def test_rows_may_be_a_view_with_a_stride() -> None:
    wide = torch.randn(20, 200).bfloat16()
    check(wide[:, 8:72], torch.randn(48, 64).bfloat16(), None)
    check(wide.T[:64].T, torch.randn(48, 64).bfloat16(), None)
    check(torch.randn(64, 20).bfloat16().T, torch.randn(48, 64).bfloat16(), None)


def test_a_bias_may_have_a_stride() -> None:
    check(torch.randn(20, 64).bfloat16(), torch.randn(48, 64).bfloat16(), torch.randn(48, 2).bfloat16()[:, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_product_may_be_activated(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 64).to(dtype), torch.randn(48, 64).to(dtype), torch.randn(48).to(dtype)
    result = linear(x, pack(weight), bias, activation=Pointwise.RELU2)
    exact = reference.linear(x.double(), weight.double(), bias.double(), activation=Pointwise.RELU2)
    assert_as_accurate(result, exact, reference.linear(x, weight, bias, activation=Pointwise.RELU2))
    out = torch.empty_like(result)
    assert linear(x, pack(weight), bias, activation=Pointwise.RELU2, out=out) is out
    assert torch.equal(out, result)
    with pytest.raises(ValueError, match="give one of them"):
        linear(x, pack(weight), activation=Pointwise.RELU2, add_to=out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
def test_a_norm_before_and_a_sum_behind_the_product(dtype: torch.dtype, with_norm: bool) -> None:
    x, weight, before = torch.randn(5, 64).to(dtype), torch.randn(48, 64).to(dtype), torch.randn(5, 48).to(dtype)
    gain = torch.randn(64).to(dtype)

    def expected(dtype: torch.dtype) -> torch.Tensor:
        norm = RowNorm(gain.to(dtype), 1e-6) if with_norm else None
        return reference.linear(x.to(dtype), weight.to(dtype), norm=norm, add_to=before.to(dtype, copy=True))

    hidden = before.clone()
    assert linear(x, pack(weight), norm=RowNorm(gain, 1e-6) if with_norm else None, add_to=hidden) is hidden
    assert_as_accurate(hidden, expected(torch.float64), expected(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("activation", Activation)
def test_gate_and_up_are_one_product(dtype: torch.dtype, with_norm: bool, activation: Activation) -> None:
    x, weight, bias, gain = (torch.randn(shape).to(dtype) for shape in ((5, 64), (96, 64), (96,), (64,)))

    def expected(dtype: torch.dtype) -> torch.Tensor:
        norm = RowNorm(gain.to(dtype), 1e-6) if with_norm else None
        return reference.gated_linear(x.to(dtype), weight.to(dtype), bias.to(dtype), activation=activation, norm=norm)

    out = torch.full((5, 48), float("nan"), dtype=dtype)
    norm = RowNorm(gain, 1e-6) if with_norm else None
    assert gated_linear(x, pack(weight), bias, activation=activation, norm=norm, out=out) is out
    assert_as_accurate(out, expected(torch.float64), expected(dtype))


def test_a_result_is_written_to_out_or_added_in_place() -> None:
    x, packed, out = torch.randn(5, 64), pack(torch.randn(48, 64)), torch.full((5, 48), float("nan"))
    assert linear(x, packed, out=out) is out
    assert torch.equal(out, linear(x, packed))
    with pytest.raises(ValueError, match="give one of them"):
        linear(x, packed, out=out, add_to=out)


def test_packing_leaves_the_weight_as_it_was() -> None:
    weight = torch.randn(40, 64).bfloat16()
    before = weight.clone()
    packed = pack(weight)
    assert torch.equal(weight, before)
    assert packed.shape == (40, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("depth", [512, 510], ids=["whole tiles", "no whole tiles"])
def test_a_row_gives_the_same_bits_alone_as_in_any_batch(depth: int, dtype: torch.dtype) -> None:
    packed = pack(torch.randn(200, depth).to(dtype))
    assert packed.in_panels
    x = torch.randn(2100, depth).to(dtype)
    together = linear(x, packed)
    for begin, end in [
        (0, 1),
        (7, 8),
        (5, 7),
        (4, 7),
        (3, 9),
        (3, 17),
        (5, 37),
        (100, 133),
        (100, 290),
        (900, 2100),
        (2099, 2100),
    ]:
        assert torch.equal(linear(x[begin:end], packed), together[begin:end])


def test_the_number_of_threads_changes_no_bit() -> None:
    packed, x = pack(torch.randn(200, 512).bfloat16()), torch.randn(40, 512).bfloat16()
    torch.set_num_threads(2)
    with_two = linear(x, packed)
    torch.set_num_threads(1)
    assert torch.equal(linear(x, packed), with_two)


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (torch.zeros(3, 63, dtype=torch.bfloat16), None),
        (torch.zeros(3, 64), None),
        (torch.zeros(64, dtype=torch.bfloat16), None),
        (torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(39, dtype=torch.bfloat16)),
        (torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(40)),
    ],
    ids=["depth", "dtype", "dimensions", "bias length", "bias dtype"],
)
def test_operands_that_do_not_fit_are_refused(x: torch.Tensor, bias: torch.Tensor | None) -> None:
    packed = pack(torch.zeros(40, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"give torch\.bfloat16"):
        linear(x, packed, bias)
