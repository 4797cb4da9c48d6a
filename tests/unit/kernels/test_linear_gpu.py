"""Linear layers in Triton: interpreted in CI, compiled on machines with a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from baton.kernels import pdl, tuned
from baton.kernels.linear import Activation, Pointwise, RowNorm, reference
from baton.kernels.rms_norm.reference import rms_norm

from ...helpers.aot import compile_for_h200
from .kernel_checks import assert_as_accurate

pytest.importorskip("triton")
from baton.kernels.linear import gpu
from baton.kernels.linear.gpu import Method, gemm, gemv

pytestmark = pytest.mark.exhaustive

FEW = {"method": Method.FEW_TOKENS, "BLOCK_N": 8, "BLOCK_K": 128, "num_warps": 4, **gpu.NOTHING, "PRELOAD": 1}
TILES = {**FEW, "method": Method.TILES, "BLOCK_N": 16, "TOKENS": 32, "PREFETCH": 1}
LIBRARY = {**FEW, "method": Method.LIBRARY}
EPS = 1e-5


class Layer:
    """Random operands in `dtype`, and the reference's result of them in float64."""

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        *,
        gated: bool = False,
        activation: Activation = Activation.SILU,
        pointwise: Pointwise | None = None,
        with_norm: bool = False,
        norm_dtype: torch.dtype | None = None,
        with_bias: bool = False,
        add: bool = False,
    ) -> None:
        tokens, columns, depth = shape
        rows = 2 * columns if gated else columns
        self.x = torch.randn(tokens, depth).to(device, dtype)
        self.weight = (torch.randn(rows, depth) / depth**0.5).to(device, dtype)
        self.bias = torch.randn(rows).to(device, dtype) if with_bias else None
        self.norm = RowNorm(torch.randn(depth).to(device, norm_dtype or dtype), EPS) if with_norm else None
        self.add_to = torch.randn(tokens, columns).to(device, dtype) if add else None
        self.activation = activation if gated else pointwise

    def expected(self, dtype: torch.dtype) -> Tensor:
        norm = (
            None
            if self.norm is None
            else RowNorm(self.norm.weight.to(torch.promote_types(dtype, self.norm.weight.dtype)), EPS)
        )
        bias, add_to = (None if value is None else value.to(dtype) for value in (self.bias, self.add_to))
        x, weight = self.x.to(dtype), self.weight.to(dtype)
        if isinstance(self.activation, Activation):
            return reference.gated_linear(x, weight, bias, activation=self.activation, norm=norm)
        add_to = None if add_to is None else add_to.clone()
        return reference.linear(x, weight, bias, activation=self.activation, norm=norm, add_to=add_to)

    def check(self, options: dict[str, int], **others: int) -> Tensor:
        add_to = None if self.add_to is None else self.add_to.clone()
        result = gpu.linear(
            *(self.x, self.weight, self.bias),
            norm=self.norm,
            add_to=add_to,
            out=None,
            activation=self.activation,
            options={**options, **others},
        )
        assert add_to is None or result is add_to
        # In float32 the sums' order makes a visible difference, as no rounding of the result hides it.
        is_float32 = self.x.dtype == torch.float32
        expected, same_precision = self.expected(torch.float64), self.expected(self.x.dtype)
        assert_as_accurate(result, expected, same_precision, 4.0 if is_float32 else 2.0, terms=self.terms * is_float32)
        return result

    @property
    def terms(self) -> float:
        """The largest sum of absolute values over the terms of an element of the product."""
        x = self.x.double()
        if self.norm is not None:
            x = cast(Tensor, rms_norm(x, self.norm.weight.double(), EPS))
        return (x.abs() @ self.weight.double().abs().T).max().item() if x.numel() else 0.0


EXTRAS = [{}, {"gated": True}, {"with_norm": True}, {"with_bias": True}, {"add": True}]
EVERYTHING = [
    {"gated": True, "with_norm": True, "with_bias": True},
    {"gated": True, "activation": Activation.GELU_TANH, "with_norm": True, "norm_dtype": torch.float32},
    {"with_norm": True, "with_bias": True, "add": True},
    {"pointwise": Pointwise.RELU2},
    {"pointwise": Pointwise.RELU2, "with_norm": True, "with_bias": True},
]


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("options", [FEW, TILES, LIBRARY], ids=["few", "tiles", "library"])
@pytest.mark.parametrize("extras", [*EXTRAS, *EVERYTHING], ids=str)
def test_norms_and_activations_and_biases_and_sums_around_a_product(
    options: dict[str, int], extras: dict[str, Any], triton_device: torch.device
) -> None:
    Layer(triton_device, torch.float16, (2, 24, 256), **extras).check(options)


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_products_of_few_tokens_equal_the_reference(tokens: int, gated: bool, triton_device: torch.device) -> None:
    Layer(triton_device, torch.float32, (tokens, 8, 128), gated=gated, with_norm=True).check(FEW)


@pytest.mark.parametrize("columns", [1, 7, 8, 13])
@pytest.mark.parametrize("options", [FEW, TILES], ids=["few", "tiles"])
@pytest.mark.parametrize("gated", [False, True])
def test_columns_that_fill_no_program(
    columns: int, options: dict[str, int], gated: bool, triton_device: torch.device
) -> None:
    Layer(triton_device, torch.float16, (3, columns, 128), gated=gated, with_bias=True).check(options)


@pytest.mark.parametrize("depth", [128, 384, 640])
@pytest.mark.parametrize("changes", [{"PRELOAD": 0}, {"PRELOAD": 2, "PREFETCH": 1}, {"BLOCK_K": 1024}], ids=str)
def test_any_depth_in_any_steps(depth: int, changes: dict[str, int], triton_device: torch.device) -> None:
    Layer(triton_device, torch.float32, (1, 8, depth), with_norm=True).check(FEW, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("split", [2, 4, 8])
@pytest.mark.parametrize("extras", [{}, *EVERYTHING], ids=str)
def test_the_parts_of_a_split_depth_are_added_up(
    split: int, extras: dict[str, Any], triton_device: torch.device
) -> None:
    layer = Layer(triton_device, torch.float16, (5, 40, 1024), **extras)
    first = layer.check(TILES, SPLIT=split)
    assert torch.equal(layer.check(TILES, SPLIT=split), first)


@pytest.mark.parametrize("tokens", [1, 16, 33, 70])
def test_tiles_of_any_number_of_tokens(tokens: int, triton_device: torch.device) -> None:
    Layer(triton_device, torch.float16, (tokens, 24, 128), add=True).check(TILES)


def test_a_result_is_written_to_out_or_added_in_place(triton_device: torch.device) -> None:
    layer = Layer(triton_device, torch.float16, (2, 16, 128))
    expected = layer.check(LIBRARY)
    for options in (FEW, TILES, LIBRARY):
        wide = torch.full((2, 40), float("nan"), dtype=torch.float16, device=triton_device)
        out = wide[:, 8:24] if options is not LIBRARY else wide[:, 8:24].contiguous()
        operands = {"norm": None, "add_to": None, "out": out, "activation": None, "options": options}
        assert gpu.linear(layer.x, layer.weight, None, **operands) is out
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
        assert wide[:, :8].isnan().all()
        assert wide[:, 24:].isnan().all()


def test_tokens_may_be_a_view_with_a_stride(triton_device: torch.device) -> None:
    layer = Layer(triton_device, torch.float16, (4, 16, 256))
    layer.x, layer.weight = layer.x[:, 128:], layer.weight[:, :128].contiguous()
    for options in (FEW, TILES):
        layer.check(options)


def test_the_library_serves_shapes_that_the_kernels_do_not(triton_device: torch.device) -> None:
    cases = [
        Layer(triton_device, torch.float32, (2, 8, 100)),
        Layer(triton_device, torch.float32, (5, 8, 128)),
    ]
    cases.append(Layer(triton_device, torch.float32, (2, 8, 128)))
    cases[-1].weight = cases[-1].weight.T.contiguous().T
    for layer in cases:
        assert gpu.fitting_method(FEW, layer.x, layer.weight) is Method.LIBRARY
        layer.check(FEW)


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device whose options are those tuned for an H200."""
    monkeypatch.setattr(tuned, "device_name", lambda device: "NVIDIA_H200")
    tuned.forget()
    yield torch.device("cuda", 0)
    tuned.forget()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(896, 896), (1280, 2560), (5120, 2048), (7168, 18432), (32000, 2048)])
def test_shapes_that_were_never_measured_get_options_that_serve_them(
    gated: bool, columns: int, depth: int, on_an_h200: torch.device
) -> None:
    for tokens in (1, 2, 3, 4, 5, 8, 17, 64, 200, 256):
        options = gpu.options_for(tokens, columns, depth, on_an_h200, gated=gated)
        assert tokens <= gpu.MAX_TOKENS or options["method"] != Method.FEW_TOKENS
        assert options["TOKENS"] >= min(64, tokens) or options["method"] != Method.TILES
    for tokens in (257, 4096):
        assert gpu.options_for(tokens, columns, depth, on_an_h200, gated=gated)["method"] == Method.LIBRARY


BFLOAT16 = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "num_tokens": "i32"}
STRIDES = {"x_stride": "i32:16", "out_stride": "i32:16"}


def of_activation(name: str) -> dict[str, Any]:
    """Return constants of a kernel that applies an activation to its products, with columns of 8 rows of the weight."""
    gated = name in [activation.value for activation in Activation]
    return {"ACTIVATION": name, "GATED": gated, "ADD": False, "bias": None, "BLOCK_N": 4 if gated else 8}


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "norm"), [("silu", "*bf16"), ("gelu_tanh", "*fp32"), ("relu2", "*bf16")])
def test_weights_are_loaded_before_the_wait_for_the_input_of_few_tokens(activation: str, norm: str) -> None:
    types = {**BFLOAT16, **STRIDES, "norm": norm, "eps": "fp32"}
    steps = {"BLOCK_K": 1024, "PRELOAD": 2, "PREFETCH": True, "THREAD": 8}
    for tokens in (1, 2, 4):
        constants = {"COLUMNS": 3072, "DEPTH": 4096, "TOKENS": tokens, **steps, **of_activation(activation)}
        compiled = compile_for_h200(gemv.gemv_kernel, types, constants, num_warps=4)
        before, after = compiled.ptx.split("griddepcontrol.wait")
        assert before.count("ld.global.v4") == 2 * 8, "two steps of 8 rows are loaded before the wait"
        assert "prefetch.global.L2" in before
        assert "ld.global" in after


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("split", [1, 4])
def test_tiles_are_multiplied_on_the_warp_group_instructions(split: int, activation: str) -> None:
    types = {**BFLOAT16, **STRIDES, "parts": "*fp32", "arrived": "*i32"}
    for tokens in (16, 64):
        sizes = {"COLUMNS": 3072, "DEPTH": 4096, "TOKENS": tokens, "BLOCK_K": 128}
        constants = {**sizes, "SPLIT": split, "PREFETCH": 4, **of_activation(activation)}
        constants["BLOCK_N"] *= 8
        compiled = compile_for_h200(gemm.gemm_kernel, types, constants, num_warps=4, num_stages=4)
        assert compiled.wgmma
        assert "cp.async" in compiled.ptx


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("extras", [*EXTRAS, *EVERYTHING], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 64, 100])
@pytest.mark.parametrize(("columns", "depth"), [(1024, 3072), (4096, 2560)])
def test_bfloat16_on_the_device(extras: dict[str, Any], tokens: int, columns: int, depth: int) -> None:
    layer = Layer("cuda", torch.bfloat16, (tokens, columns, depth), **extras)
    layer.check(gpu.options_for(tokens, columns, depth, layer.x.device, gated=isinstance(layer.activation, Activation)))
    layer.check({**TILES, "BLOCK_N": 64, "num_stages": 3})
    layer.check({**TILES, "BLOCK_N": 64, "num_stages": 3, "SPLIT": 4})
    if tokens <= 4:
        layer.check({**FEW, "BLOCK_K": 1024})


@pytest.mark.gpu
@pytest.mark.parametrize("options", [FEW, {**TILES, "BLOCK_N": 64, "num_stages": 3}], ids=["few", "tiles"])
def test_weights_past_4_gib_are_found(options: dict[str, int]) -> None:
    depth = 8192
    rows = (1 << 32) // depth + 8
    weight = torch.zeros(rows, depth, dtype=torch.bfloat16, device="cuda")
    weight[-8:] = torch.randn(8, depth)
    x = torch.randn(1, depth, dtype=torch.bfloat16, device="cuda")
    operands = {"norm": None, "add_to": None, "out": None, "activation": None, "options": options}
    result = gpu.linear(x, weight, None, **operands)
    near = gpu.linear(x, weight[-8:].clone(), None, **operands)
    torch.testing.assert_close(result[:, -8:], near)
    assert not result[:, :-8].any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4, 16, 64])
def test_kernels_that_start_early_in_a_graph_give_the_same_as_one_by_one(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this chain every kernel reads the previous kernel's output, and adds to that kernel's input."""
    layers = [
        (
            Layer("cuda", torch.bfloat16, (1, 3072, 1024), gated=True, with_norm=True),
            Layer("cuda", torch.bfloat16, (1, 1024, 3072)),
        )
        for _ in range(8)
    ]
    start = torch.randn(tokens, 1024).to("cuda", torch.bfloat16)
    around = {"bias": None, "out": None}

    def run() -> Tensor:
        hidden = start.clone()
        for up, down in layers:
            inner = gpu.linear(hidden, up.weight, norm=up.norm, add_to=None, activation=Activation.SILU, **around)
            gpu.linear(inner, down.weight, norm=None, add_to=hidden, activation=None, **around)
        return hidden

    with monkeypatch.context() as ordinary:
        ordinary.setattr(pdl, "launch_options", dict)
        expected = run()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for _ in range(20):
        result.fill_(float("nan"))
        graph.replay()
        assert torch.equal(result, expected)
