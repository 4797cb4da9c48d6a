"""Head norm, rotation and KV write against the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch
from baton.kernels.rope_kv import reference, rope_and_cache

from .kernel_checks import assert_as_accurate, untouched_memory

pytestmark = pytest.mark.exhaustive

LAYER, NUM_LAYERS, BLOCK_SIZE = 1, 3, 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Step:
    q: Tensor
    k: Tensor
    v: Tensor
    cos_sin: Tensor
    kv: Tensor
    batch: AttentionBatch
    norms: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Step:
        norms = {
            name: norm.to(torch.promote_types(norm.dtype, dtype)) if isinstance(norm, Tensor) else norm
            for name, norm in self.norms.items()
        }
        cast = (tensor.to(dtype, copy=True) for tensor in (self.q, self.k, self.v))
        return Step(*cast, self.cos_sin.clone(), self.kv.to(dtype, copy=True), self.batch, norms)

    def run(self, op=rope_and_cache) -> Step:  # type: ignore[no-untyped-def]
        assert op(self.q, self.k, self.v, self.cos_sin, self.kv, LAYER, self.batch, **self.norms) is self.q
        return self


def step(
    dtype: torch.dtype = torch.float32,
    *,
    query_lens: tuple[int, ...] = (1, 1, 40),
    seq_lens: tuple[int, ...] = (33, 1, 50),
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    value_dim: int | None = None,
    rotary_dim: int | None = None,
    turning: int | None = None,
    with_norms: bool = True,
    norm_dtype: torch.dtype | None = None,
) -> Step:
    """Return a step of random inputs and a cache full of NaN."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
    tables = torch.randperm(len(counts) * max(counts), generator=generator, dtype=torch.int32).view(len(counts), -1)
    batch = AttentionBatch.plan(query_lens, seq_lens, tables, BLOCK_SIZE)
    widths = (head_dim, head_dim, value_dim or head_dim)
    shapes = [(batch.num_tokens, heads[number > 0], width) for number, width in enumerate(widths)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    angles = torch.randn(max(seq_lens) + 1, turning or (rotary_dim or head_dim) // 2, generator=generator)
    norms: dict[str, Any] = {"rotary_dim": rotary_dim}
    if with_norms:
        q_norm, k_norm = torch.randn(2, head_dim, generator=generator).to(norm_dtype or dtype)
        norms |= {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}
    planes, width = (2, head_dim) if value_dim is None else (1, head_dim + value_dim)
    kv = torch.full((tables.numel(), heads[1], NUM_LAYERS, planes, BLOCK_SIZE, width), float("nan"), dtype=dtype)
    return Step(q, k, v, torch.cat([angles.cos(), angles.sin()], dim=1), kv, batch, norms)


def check(inputs: Step) -> None:
    dtype = inputs.q.dtype
    exact = inputs.to(torch.float64).run(reference.rope_and_cache)
    same = inputs.to(dtype).run(reference.rope_and_cache)
    result = inputs.to(dtype).run()
    assert_as_accurate(result.q, exact.q, same.q)
    assert_as_accurate(result.k, exact.k, same.k)
    blocks, offsets = inputs.batch.slots // BLOCK_SIZE, inputs.batch.slots % BLOCK_SIZE
    kept = result.kv[blocks, :, LAYER, :, offsets]  # [tokens, heads, planes, width]
    assert torch.equal(kept.flatten(2), torch.cat([result.k, inputs.v], dim=-1))
    result.kv[blocks, :, LAYER, :, offsets] = float("nan")
    assert result.kv.isnan().all(), "other parts of the cache were written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("head_dim", [2, 24, 64, 80, 128])
def test_heads_are_normalised_rotated_and_cached(dtype: torch.dtype, with_norms: bool, head_dim: int) -> None:
    check(step(dtype, head_dim=head_dim, with_norms=with_norms))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [2, 20, 32])
def test_dimensions_past_the_rotary_ones_are_not_rotated(dtype: torch.dtype, rotary_dim: int) -> None:
    check(step(dtype, rotary_dim=rotary_dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rotary_dim", "turning"), [(64, 8), (64, 3), (40, 19), (64, 32)])
def test_pairs_without_angles_are_not_rotated(dtype: torch.dtype, rotary_dim: int, turning: int) -> None:
    check(step(dtype, rotary_dim=rotary_dim, turning=turning))


def test_pairs_without_angles_are_those_whose_angle_is_0() -> None:
    short = step(rotary_dim=40, turning=6)
    cos, sin = short.cos_sin.chunk(2, dim=1)
    still = cos.new_zeros(len(cos), 14)
    whole = replace(short, cos_sin=torch.cat([cos, still + 1, sin, still], dim=1))
    expected, result = (inputs.to(torch.float32).run(reference.rope_and_cache) for inputs in (whole, short))
    assert torch.equal(result.q, expected.q)
    assert torch.equal(result.k, expected.k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim", "rotary_dim"), [(192, 128, 64), (48, 16, 32), (32, 80, 10)])
def test_values_of_another_width_are_stored_after_their_keys(
    dtype: torch.dtype, head_dim: int, value_dim: int, rotary_dim: int
) -> None:
    check(step(dtype, head_dim=head_dim, value_dim=value_dim, rotary_dim=rotary_dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_queries_are_rotated_if_keys_and_values_are_of_another_layer(dtype: torch.dtype) -> None:
    inputs = step(dtype)
    inputs.norms["k_norm"] = None  # type: ignore[assignment]
    expected = inputs.to(dtype).run(reference.rope_and_cache)
    inputs.k, inputs.v = inputs.k[:, :0], inputs.v[:, :0]
    result = inputs.to(dtype).run()
    torch.testing.assert_close(result.q, expected.q)
    assert result.kv.isnan().all()


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 6)])
def test_any_number_of_heads(heads: tuple[int, int], num_threads: int) -> None:
    check(step(torch.bfloat16, heads=heads, query_lens=(1, 300), seq_lens=(17, 300)))


def test_only_the_query_heads_may_have_a_norm() -> None:
    inputs = step()
    inputs.norms["k_norm"] = None  # type: ignore[assignment]
    check(inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_in_float32_are_not_rounded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = step(dtype, norm_dtype=torch.float32)
    check(inputs)
    expected = inputs.to(dtype).run(reference.rope_and_cache)
    monkeypatch.setattr(reference, "rope_and_cache", lambda *args, **kwargs: pytest.fail("the reference was called"))
    result = inputs.to(dtype).run()
    assert (result.q != expected.q).float().mean() < 0.01, "results may differ by the order of sums only"
    rounded = inputs.to(dtype)
    rounded.norms = {name: norm.to(dtype) if isinstance(norm, Tensor) else norm for name, norm in inputs.norms.items()}
    assert (rounded.run().q != expected.q).float().mean() > 0.1


def test_an_empty_batch_changes_nothing() -> None:
    inputs = step()
    empty = AttentionBatch.plan([], [], torch.zeros(0, 1, dtype=torch.int32), BLOCK_SIZE)
    none = Step(inputs.q[:0], inputs.k[:0], inputs.v[:0], inputs.cos_sin, inputs.kv, empty, inputs.norms).run()
    assert none.kv.isnan().all()


def test_q_k_and_v_may_be_views_into_one_projection() -> None:
    apart = step(torch.bfloat16)
    fused = torch.cat([heads.flatten(1) for heads in (apart.q, apart.k, apart.v)], dim=1)
    q, k, v = (part.unflatten(1, (-1, 64)) for part in fused.split([4 * 64, 2 * 64, 2 * 64], dim=1))
    together = Step(q, k, v, apart.cos_sin, apart.kv.clone(), apart.batch, apart.norms).run()
    apart.run()
    assert torch.equal(together.q, apart.q)
    assert torch.equal(together.k, apart.k)
    assert torch.equal(together.kv.nan_to_num(7.0), apart.kv.nan_to_num(7.0))


def test_a_token_gives_the_same_bits_alone_as_in_a_batch() -> None:
    whole = step(torch.bfloat16, query_lens=(300,), seq_lens=(300,))
    alone = whole.to(torch.bfloat16)
    whole.run()
    last = AttentionBatch.plan([1], [300], whole.batch.block_tables, BLOCK_SIZE)
    result = Step(alone.q[-1:], alone.k[-1:], alone.v[-1:], alone.cos_sin, alone.kv, last, alone.norms).run()
    assert torch.equal(result.q, whole.q[-1:])
    assert torch.equal(result.k, whole.k[-1:])


@pytest.mark.parametrize("op", [rope_and_cache, reference.rope_and_cache])
def test_padding_is_written_nowhere(op) -> None:  # type: ignore[no-untyped-def]
    whole, padded = step(), step()
    padded.batch.slots[[0, 5]] = -1
    whole.run()
    padded.run(op)
    gone = whole.batch.slots[[0, 5]]
    whole.kv[gone // BLOCK_SIZE, :, LAYER, :, gone % BLOCK_SIZE] = float("nan")
    torch.testing.assert_close(padded.kv, whole.kv, equal_nan=True)


def test_an_fp8_cache_holds_scaled_values_that_saturate() -> None:
    inputs = step(torch.bfloat16, with_norms=False)
    inputs.kv = torch.zeros(inputs.kv.shape, dtype=torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([1e-3])}
    inputs.norms = scales
    inputs.run()
    blocks, offsets = inputs.batch.slots // BLOCK_SIZE, inputs.batch.slots % BLOCK_SIZE
    kept = inputs.kv.float()[blocks, :, LAYER, :, offsets]
    assert torch.equal(kept[:, :, 0], (inputs.k.float() / 0.5).to(torch.float8_e4m3fn).float())
    assert torch.equal(kept[:, :, 1], (inputs.v.float() / 1e-3).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_slots_beyond_4_gib_of_elements_are_found() -> None:
    inputs = step(torch.bfloat16, query_lens=(3,), seq_lens=(20,))
    far = (1 << 32) // inputs.kv[0].numel() + 1
    tables = inputs.batch.block_tables + far
    kv = untouched_memory((far + inputs.kv.shape[0], *inputs.kv.shape[1:]), torch.bfloat16)
    batch = AttentionBatch.plan([3], [20], tables, BLOCK_SIZE)
    v = inputs.v.clone()
    result = Step(inputs.q, inputs.k, inputs.v, inputs.cos_sin, kv, batch, inputs.norms).run()
    blocks, offsets = batch.slots // BLOCK_SIZE, batch.slots % BLOCK_SIZE
    assert torch.equal(kv[blocks, :, LAYER, 0, offsets], result.k)
    assert torch.equal(kv[blocks, :, LAYER, 1, offsets], v)
