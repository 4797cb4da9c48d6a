"""Head norm, rotation and KV write in Triton: interpreted in CI, compiled on machines with a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch
from baton.kernels.rope_kv import reference

from ...helpers.aot import compile_for_h200
from .kernel_checks import assert_as_accurate

gpu = pytest.importorskip("baton.kernels.rope_kv.gpu")

pytestmark = pytest.mark.exhaustive

LAYER, NUM_LAYERS, BLOCK_SIZE = 1, 3, 16


@dataclass
class Step:
    """q, k and v as views into one projection, and a cache full of poison."""

    qkv: Tensor  # [num_tokens, widths of all heads of q, k and v]
    heads: tuple[int, int]
    value_dim: int
    cos_sin: Tensor
    kv: Tensor
    batch: AttentionBatch
    options: dict[str, Any]

    def run(self, op, dtype: torch.dtype | None = None, kv_dtype: torch.dtype | None = None) -> Step:  # type: ignore[no-untyped-def]
        """Run `op` on copies, and return a step of the results."""
        dtype = dtype or self.qkv.dtype
        norms = {
            name: value.to(torch.promote_types(value.dtype, dtype))
            if isinstance(value, Tensor) and name.endswith("norm")
            else value
            for name, value in self.options.items()
        }
        copy = replace(self, qkv=self.qkv.to(dtype, copy=True), kv=self.kv.to(kv_dtype or self.kv.dtype, copy=True))
        q, k, v = copy.parts()
        assert op(q, k, v, self.cos_sin, copy.kv, LAYER, self.batch, **norms) is q
        return copy

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        heads, dim = self.heads, self.head_dim
        q, k, v = self.qkv.split([heads[0] * dim, heads[1] * dim, heads[1] * self.value_dim], dim=1)
        return q.unflatten(1, (-1, dim)), k.unflatten(1, (-1, dim)), v.unflatten(1, (-1, self.value_dim))

    @property
    def head_dim(self) -> int:
        return (self.qkv.shape[1] - self.heads[1] * self.value_dim) // sum(self.heads)

    def kept(self, plane: int) -> Tensor:
        """Return the keys or values of this step's tokens in the cache: [num_tokens, kv_heads, width]."""
        slots = self.batch.slots
        rows = self.kv[slots // BLOCK_SIZE, :, LAYER, :, slots % BLOCK_SIZE].flatten(2)
        return rows.split([self.head_dim, self.value_dim], dim=-1)[plane]


def step(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    query_lens: tuple[int, ...] = (1, 1, 4),
    seq_lens: tuple[int, ...] = (33, 1, 19),
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    value_dim: int | None = None,
    rotary_dim: int | None = None,
    turning: int | None = None,
    with_norms: bool = True,
    norm_dtype: torch.dtype | None = None,
) -> Step:
    torch.manual_seed(0)  # errors near the tolerance must be the same in every run
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
    tables = torch.randperm(len(counts) * max(counts), dtype=torch.int32).view(len(counts), -1).to(device)
    batch = AttentionBatch.plan(query_lens, seq_lens, tables, BLOCK_SIZE)
    width = sum(heads) * head_dim + heads[1] * (value_dim or head_dim)
    qkv = torch.randn(batch.num_tokens, width).to(device, dtype)
    angles = torch.randn(max(seq_lens) + 1, turning or (rotary_dim or head_dim) // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    options: dict[str, Any] = {"rotary_dim": rotary_dim}
    if with_norms:
        q_norm, k_norm = torch.randn(2, head_dim).to(device, norm_dtype or dtype)
        options |= {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}
    planes, width = (2, head_dim) if value_dim is None else (1, head_dim + value_dim)
    shape = (tables.numel(), heads[1], NUM_LAYERS, planes, BLOCK_SIZE, width)
    kv = torch.full(shape, float("nan"), dtype=dtype, device=device)
    return Step(qkv, heads, value_dim or head_dim, cos_sin, kv, batch, options)


def check(inputs: Step) -> None:
    exact = inputs.run(reference.rope_and_cache, torch.float64, torch.float64)
    same = inputs.run(reference.rope_and_cache)
    result = inputs.run(gpu.rope_and_cache)
    assert_as_accurate(result.parts()[0], exact.parts()[0], same.parts()[0])
    assert_as_accurate(result.kept(0), exact.kept(0), same.kept(0))
    assert torch.equal(result.kept(1), inputs.parts()[2])
    assert torch.equal(result.parts()[2], inputs.parts()[2])
    slots = inputs.batch.slots
    result.kv[slots // BLOCK_SIZE, :, LAYER, :, slots % BLOCK_SIZE] = float("nan")
    assert result.kv.isnan().all(), "other parts of the cache were written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("head_dim", [2, 24, 64])
def test_heads_are_normalised_rotated_and_cached(
    dtype: torch.dtype, with_norms: bool, head_dim: int, triton_device: torch.device
) -> None:
    check(step(triton_device, dtype, head_dim=head_dim, with_norms=with_norms))


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("head_dim", "value_dim", "rotary_dim"), [(192, 128, 64), (48, 16, 32), (24, 40, 10)])
def test_values_of_another_width_are_stored_after_their_keys(
    head_dim: int, value_dim: int, rotary_dim: int, with_norms: bool, triton_device: torch.device
) -> None:
    shape = {"head_dim": head_dim, "value_dim": value_dim, "rotary_dim": rotary_dim}
    check(step(triton_device, with_norms=with_norms, **shape))


def test_only_queries_are_rotated_if_keys_and_values_are_of_another_layer(triton_device: torch.device) -> None:
    inputs = step(triton_device)
    (q, k, v), q_norm = inputs.parts(), inputs.options["q_norm"]
    expected = inputs.run(reference.rope_and_cache)
    alone, kv = q.clone(), inputs.kv.clone()
    gpu.rope_and_cache(alone, k[:, :0], v[:, :0], inputs.cos_sin, kv, LAYER, inputs.batch, q_norm=q_norm, eps=1e-6)
    torch.testing.assert_close(alone, expected.parts()[0])
    assert kv.isnan().all()


@pytest.mark.parametrize("rotary_dim", [2, 20, 24])
@pytest.mark.parametrize("with_norms", [False, True])
def test_dimensions_past_the_rotary_ones_are_not_rotated(
    rotary_dim: int, with_norms: bool, triton_device: torch.device
) -> None:
    check(step(triton_device, rotary_dim=rotary_dim, with_norms=with_norms))


@pytest.mark.parametrize(("rotary_dim", "turning"), [(32, 4), (24, 3), (32, 16)])
@pytest.mark.parametrize("with_norms", [False, True])
def test_pairs_without_angles_are_not_rotated(
    rotary_dim: int, turning: int, with_norms: bool, triton_device: torch.device
) -> None:
    check(step(triton_device, rotary_dim=rotary_dim, turning=turning, with_norms=with_norms))


@pytest.mark.parametrize("heads", [(1, 1), (9, 1), (20, 10)])
def test_any_number_of_heads(heads: tuple[int, int], triton_device: torch.device) -> None:
    check(step(triton_device, heads=heads))


def test_a_program_of_a_large_batch_takes_more_heads(
    monkeypatch: pytest.MonkeyPatch, triton_device: torch.device
) -> None:
    monkeypatch.setattr(gpu, "MANY_TOKENS", 1)
    check(step(triton_device, heads=(20, 3)))


def test_norms_may_be_in_float32(triton_device: torch.device) -> None:
    check(step(triton_device, torch.float16, norm_dtype=torch.float32))


def test_only_the_query_heads_may_have_a_norm(triton_device: torch.device) -> None:
    inputs = step(triton_device)
    inputs.options["k_norm"] = None
    check(inputs)


def test_padding_is_written_nowhere(triton_device: torch.device) -> None:
    inputs = step(triton_device)
    inputs.batch.slots[[0, 3]] = -1
    result, expected = inputs.run(gpu.rope_and_cache), inputs.run(reference.rope_and_cache)
    torch.testing.assert_close(result.kv, expected.kv, equal_nan=True)
    assert result.parts()[0].isfinite().all()


def eight_bits(inputs: Step, k_scale: float, v_scale: float) -> Step:
    """Return the same step with an FP8 cache."""
    device = inputs.kv.device
    scales = {"k_scale": torch.tensor(k_scale, device=device), "v_scale": torch.tensor([v_scale], device=device)}
    kv = torch.zeros(inputs.kv.shape, dtype=torch.float8_e4m3fn, device=device)
    return replace(inputs, kv=kv, options={**inputs.options, **scales})


def test_an_fp8_cache_holds_scaled_values_that_saturate(triton_device: torch.device) -> None:
    """The numbers need no rounding, since the interpreter's is wrong if it carries into the exponent."""
    inputs = step(triton_device, with_norms=False)
    half = inputs.cos_sin.shape[1] // 2
    inputs.cos_sin[:, :half], inputs.cos_sin[:, half:] = 1.0, 0.0
    inputs.qkv = inputs.qkv.to(torch.float8_e4m3fn).float()
    inputs = eight_bits(inputs, 0.5, 2.0**-10)
    result, expected = inputs.run(gpu.rope_and_cache).kv.float(), inputs.run(reference.rope_and_cache).kv.float()
    assert torch.equal(result, expected)
    assert result.abs().max() == 448


def test_no_tokens_change_nothing(triton_device: torch.device) -> None:
    inputs = step(triton_device)
    empty = AttentionBatch.plan([], [], torch.zeros(0, 1, dtype=torch.int32, device=triton_device), BLOCK_SIZE)
    assert replace(inputs, qkv=inputs.qkv[:0], batch=empty).run(gpu.rope_and_cache).kv.isnan().all()


def test_tensors_that_do_not_fit_are_refused(triton_device: torch.device) -> None:
    inputs = step(triton_device)
    with pytest.raises(ValueError, match="no keys of 32 dimensions"):
        replace(inputs, kv=inputs.kv[..., :16]).run(gpu.rope_and_cache)
    with pytest.raises(ValueError, match="do not fit"):
        replace(inputs, kv=inputs.kv[:, :1]).run(gpu.rope_and_cache)
    with pytest.raises(ValueError, match="contiguous"):
        replace(inputs, kv=inputs.kv.mT.contiguous().mT).run(gpu.rope_and_cache)
    with pytest.raises(ValueError, match="cos_sin"):
        replace(inputs, cos_sin=inputs.cos_sin.half()).run(gpu.rope_and_cache)


@pytest.mark.parametrize(
    ("kv_type", "norm", "dim"), [("bf16", "*bf16", 128), ("fp8e4nv", "*bf16", 128), ("bf16", "*fp32", 256)]
)
def test_loads_are_wide(kv_type: str, norm: str, dim: int) -> None:
    types = {**dict.fromkeys(("q", "k", "v"), "*bf16"), **dict.fromkeys(("q_norm", "k_norm"), norm)}
    types |= {"cos_sin": "*fp32", "planes": f"*{kv_type}", "positions": "*i64", "slots": "*i64"}
    types |= {f"{name}_stride": "i32:16" for name in ("q", "k", "v", "block", "head")}
    types["to_value"] = "i32:16"
    types |= {"k_scale": "*fp32", "v_scale": "*fp32", "eps": "fp32"}
    shape = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": dim // 2, "TURNING": dim // 2, "BLOCK_SIZE": 16}
    shape |= dict.fromkeys(("DIM", "VALUE_DIM", "TOKEN_STRIDE"), dim)
    for heads, num_warps in (gpu.FEW, gpu.MANY):
        constants = {**shape, "HEADS": heads, "KV_HEADS": 8}
        compiled = compile_for_h200(gpu.rope_and_cache_kernel, types, constants, num_warps=num_warps)
        assert compiled.widest_load_bytes == 16


@pytest.mark.gpu
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((16, 8), 128), ((32, 4), 128), ((14, 2), 64), ((8, 1), 80)])
@pytest.mark.parametrize("length", [3, 700])
def test_bfloat16_on_the_device(with_norms: bool, heads: tuple[int, int], head_dim: int, length: int) -> None:
    lengths = {"query_lens": (1, length), "seq_lens": (100, 20 + length)}
    check(step(torch.device("cuda"), torch.bfloat16, heads=heads, head_dim=head_dim, with_norms=with_norms, **lengths))


@pytest.mark.gpu
def test_a_cache_of_8_bits_is_rounded_to_nearest() -> None:
    inputs = eight_bits(step(torch.device("cuda"), torch.bfloat16, query_lens=(500,), seq_lens=(600,)), 0.02, 0.3)
    result, expected = inputs.run(gpu.rope_and_cache).kv.float(), inputs.run(reference.rope_and_cache).kv.float()
    # If a value is midway between two FP8 numbers, the last bit of the rotation decides.
    torch.testing.assert_close(result, expected, rtol=2**-3, atol=2**-9)
    assert (result == expected).float().mean() > 0.99


@pytest.mark.gpu
def test_slots_past_4_gib_are_found() -> None:
    inputs = step(torch.device("cuda"), torch.bfloat16)
    far = (1 << 32) // inputs.kv[0].numel() + 1
    kv = torch.empty((far + len(inputs.kv), *inputs.kv.shape[1:]), dtype=torch.bfloat16, device="cuda")
    kv[far:] = float("nan")
    batch = replace(inputs.batch, slots=inputs.batch.slots + far * BLOCK_SIZE)
    gpu.rope_and_cache(
        *replace(inputs, qkv=inputs.qkv.clone()).parts(), inputs.cos_sin, kv, LAYER, batch, **inputs.options
    )
    near = inputs.run(gpu.rope_and_cache)
    assert torch.equal(kv[far:].nan_to_num(7.0), near.kv.nan_to_num(7.0))
