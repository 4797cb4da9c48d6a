"""With every backend, tokens get the same sums from spread experts as from experts on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.layers.base import Layer
from baton.engine.layers.moe import MoE
from baton.engine.layers.step_context import TokenRows
from baton.engine.parallel.dispatch import ExpertDispatch
from baton.engine.parallel.groups import ALL2ALL_BACKENDS, ALL_ALONE, ExpertSpread, ParallelGroups
from baton.kernels.p2p import RoutedTokens
from baton.kernels.p2p.token_exchange import ROW_VALUES

from ...helpers.thread_groups import run_ranks

HIDDEN, EXPERTS = 32, 12


def config(**changes: Any) -> ExpertsConfig:
    keys: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 3, "intermediate_size": 24, "shared_intermediate_size": 40}
    return ExpertsConfig(**{**keys, "sparse_layers": (True,), **changes})


def filled(layer: Layer) -> None:
    """Fill each rank's share from the same tensors."""
    layer.allocate("cpu", torch.float32)
    for slot in layer.slots("mlp"):
        generator = torch.Generator().manual_seed(sum(slot.name.encode()))
        if slot.num_elements:
            slot.place(torch.randn(slot.shape, generator=generator) / 5)
    layer.finish()


def tokens_of(rank: int, count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 + rank))


def slots_of(count: int) -> Tensor:
    """Return KV slots; the last of several tokens is padding."""
    return torch.tensor([*range(count - 1), -1] if count > 1 else list(range(count)))


def mixture(groups: ParallelGroups, **changes: Any) -> MoE:
    moe = MoE(HIDDEN, config(**changes))
    moe.divide(groups)
    filled(moe)
    return moe


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0, 40], ids=["routed", "routed and shared"])
@pytest.mark.parametrize("redundant", [0, 12])
@pytest.mark.parametrize("backend", ALL2ALL_BACKENDS)
@pytest.mark.parametrize(
    ("tp", "counts"), [(2, [5]), (1, [4, 7]), (1, [1, 9, 2]), (2, [3, 6]), (3, [2, 5]), (2, [0, 3])]
)
def test_every_rank_gets_the_sums_of_its_own_tokens(
    tp: int, counts: list[int], backend: str, redundant: int, shared: int
) -> None:
    alone = mixture(ALL_ALONE, shared_intermediate_size=shared * 3)
    expected = [alone(tokens_of(rank, count), TokenRows(slots_of(count))) for rank, count in enumerate(counts)]

    def work(groups: ParallelGroups) -> Tensor:
        moe = mixture(groups, shared_intermediate_size=shared * 3)
        rank = groups.dp.rank
        rows = TokenRows(slots_of(counts[rank]), tuple(counts) if len(counts) > 1 else None)
        return moe(tokens_of(rank, counts[rank]), rows)

    results = run_ranks(work, tp=tp, dp=len(counts), spread=ExpertSpread(redundant, backend))
    for rank, result in enumerate(results):
        real = slots_of(counts[rank // tp]) >= 0
        torch.testing.assert_close(result[real], expected[rank // tp][real], rtol=1e-5, atol=1e-5)
        assert torch.equal(result, results[rank // tp * tp]), "ranks with the same tokens must have the same bits"


@pytest.mark.parametrize("shared", [0, 40], ids=["routed", "routed and shared"])
@pytest.mark.parametrize(
    ("dp", "spread"),
    [(1, None), (1, ExpertSpread()), *((2, ExpertSpread(0, backend)) for backend in ALL2ALL_BACKENDS)],
    ids=["divided", "replicated", *ALL2ALL_BACKENDS],
)
def test_steps_of_equal_sizes_need_no_counts_and_outputs_are_added_to_a_stream(
    dp: int, spread: ExpertSpread | None, shared: int
) -> None:
    alone, stream = mixture(ALL_ALONE, shared_intermediate_size=shared), torch.randn(4, HIDDEN)

    def work(groups: ParallelGroups) -> Tensor:
        moe = mixture(groups, shared_intermediate_size=shared)
        return moe(tokens_of(groups.dp.rank, 4), TokenRows(torch.arange(4)), add_to=stream.clone())

    for rank, result in enumerate(run_ranks(work, tp=2, dp=dp, spread=spread)):
        expected = stream + alone(tokens_of(rank // 2, 4), TokenRows(torch.arange(4)))
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ALL2ALL_BACKENDS)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_every_token_of_every_rank_is_counted_once(tp: int, dp: int, backend: str) -> None:
    counts = (5, 3)[:dp]
    alone = mixture(ALL_ALONE)
    expected = torch.zeros(EXPERTS, dtype=torch.int64)
    for rank, count in enumerate(counts):
        ids, _ = alone.gate(tokens_of(rank, count), slots_of(count))
        expected += torch.bincount(ids[ids >= 0], minlength=EXPERTS)

    def work(groups: ParallelGroups) -> Tensor:
        moe, rank = mixture(groups), groups.dp.rank
        moe(tokens_of(rank, counts[rank]), TokenRows(slots_of(counts[rank]), counts if dp > 1 else None))
        assert moe.spread is not None
        return groups.dp.all_reduce(moe.spread.table.loads)

    for loads in run_ranks(work, tp=tp, dp=dp, spread=ExpertSpread(0, backend)):
        assert loads.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_tokens_and_their_routing_are_packed_without_loss(dtype: torch.dtype, top_k: int) -> None:
    hidden, weights = torch.randn(5, HIDDEN).to(dtype), torch.randn(5, top_k)
    ids = torch.randint(-1, 2**31 - 1, (5, top_k), dtype=torch.int32)
    tokens = RoutedTokens(hidden, ids, weights)

    def check(rows: Tensor) -> Tensor:
        assert rows.stride(0) % ROW_VALUES == 0
        return torch.cat((rows, rows[:2]))

    came = tokens.through(check)
    for ours, theirs in ((came.hidden, hidden), (came.expert_ids, ids), (came.weights, weights)):
        assert torch.equal(ours, torch.cat((theirs, theirs[:2])))


def test_a_dispatch_that_lacks_a_method_cannot_be_made() -> None:
    class Half(ExpertDispatch):
        def finalize(self, partial: Tensor, served: Any) -> Tensor:
            return partial

    with pytest.raises(TypeError, match="prepare"):
        Half()  # type: ignore[abstract]
