"""Replaying a CPU graph computes what the recorded run would compute."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.kernels.activation import Activation, activation_and_mul, soft_cap
from baton.kernels.attention import AttentionBatch, AttentionRule, paged_attention
from baton.kernels.causal_conv import causal_conv
from baton.kernels.embedding import embedding
from baton.kernels.gated_delta import Gate, gated_delta
from baton.kernels.linear import PackedWeight, RowNorm, gated_linear, linear, pack
from baton.kernels.native.calls import CallRecorder, NotRecordable
from baton.kernels.native.cpu_graph import Workspace, record
from baton.kernels.rms_norm import gated_rms_norm, rms_norm
from baton.kernels.rope_kv import rope_and_cache
from baton.kernels.state_batch import StateBatch

GAIN = torch.randn(64).bfloat16()


def chain(x: Tensor) -> Tensor:
    """Run ops with float arguments, null pointers, views, and memory that is reused in between."""
    for eps in (1e-6, 1e-3, 1e-1):
        normed, total = rms_norm(x, GAIN, eps, x)
        x, _ = rms_norm(total.unflatten(1, (2, 32)).flatten(1), GAIN, eps, normed)
        x = x[:, :64]
    return x


def test_a_graph_follows_its_inputs() -> None:
    x = torch.randn(5, 64).bfloat16()
    recording = record(lambda: chain(x), Workspace())
    for _ in range(3):
        x.copy_(torch.randn(5, 64))
        expected = chain(x)
        assert not torch.equal(recording.answer, expected)
        recording.graph.replay()
        assert torch.equal(recording.answer, expected)


def test_a_graph_serves_fewer_rows_and_leaves_the_others_as_they_were() -> None:
    table, ids, wanted = torch.randn(9, 64).bfloat16(), torch.arange(8), torch.tensor([7, 3, 5])

    def run() -> Tensor:
        hidden = rms_norm(embedding(ids, table), GAIN, 1e-6)
        return activation_and_mul(rms_norm(embedding(wanted, hidden), GAIN, 1e-6), Activation.SILU)

    recording = record(run, Workspace(), (8, 3))
    recording.graph.replay(8, 3)
    whole = recording.answer.clone()
    ids[:5], wanted[:2] = torch.tensor([6, 8, 2, 0, 4]), torch.tensor([4, 1])
    recording.graph.replay(5, 2)
    assert torch.equal(recording.answer[:2], run()[:2])
    assert not torch.equal(recording.answer[:2], whole[:2])
    assert torch.equal(recording.answer[2], whole[2])


def test_layers_with_states_can_be_recorded_and_find_other_slots_and_cuts_when_they_are_replayed() -> None:
    x, weight, norm = torch.randn(6, 2 * 48).bfloat16(), torch.randn(48, 4).bfloat16(), torch.randn(16)
    gates, rate, bias = torch.randn(6, 2).bfloat16(), torch.randn(1), torch.randn(1)
    tails, states = torch.randn(7, 48, 3).bfloat16(), torch.randn(7, 1, 16, 16)
    batch = StateBatch.plan([1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])

    def run() -> Tensor:
        convolved = causal_conv(x[:, :48], weight, tails, batch)
        q, k, v = (part.unflatten(1, (1, 16)) for part in convolved.split(16, dim=1))
        out = gated_delta(q, k, v, Gate(*gates.split(1, dim=1), rate, bias), states, batch, scale=0.3)
        return gated_rms_norm(out, norm, x[:, 48:64].unflatten(1, (1, 16)), 1e-6)

    recording = record(run, Workspace(), (6,))
    before = tails.clone(), states.clone()
    batch.sources.copy_(torch.tensor([3, -1, 1, 0, 2, 6]))
    batch.targets.copy_(torch.tensor([3, 4, 1, 0, 2, 6]))
    batch.query_start.copy_(torch.tensor([0, 1, 3, 4, 5, 6, 6]))
    recording.graph.replay(5)
    answer, after = recording.answer[:5].clone(), (tails.clone(), states.clone())
    assert torch.equal(states[6], before[1][6]), "the replay has five rows; slot 6 is of the sixth"
    tails.copy_(before[0])
    states.copy_(before[1])
    batch.query_start[5:] = 5
    assert torch.equal(run()[:5], answer)
    assert torch.equal(tails, after[0])
    assert torch.equal(states, after[1])


def test_the_ops_of_gemma_can_be_recorded() -> None:
    """Scaled embeddings, norms and head norms in float32, capped scores under a window, GELU, capped logits."""
    table, ids, norm = torch.randn(9, 6 * 32).bfloat16(), torch.tensor([3, 8, 1]), 1 + torch.randn(6 * 32) / 10
    blocks = torch.tensor([[1, 0], [2, 0], [0, 0]], dtype=torch.int32)
    batch = AttentionBatch.plan([1, 1, 1], [5, 9, 1], blocks, 16)
    kv = torch.randn(3, 1, 1, 2, 16, 32).bfloat16()
    cos_sin, head_norm = torch.randn(16, 32), 1 + torch.randn(32) / 10
    rule = AttentionRule(0.2, soft_cap=2.0, window=4)

    def run() -> Tensor:
        hidden = rms_norm(embedding(ids, table, 13.875), norm, 1e-6)
        q, k, v = hidden.unflatten(1, (6, 32)).split([4, 1, 1], dim=1)
        q = rope_and_cache(q, k, v, cos_sin, kv, 0, batch, q_norm=head_norm, k_norm=head_norm, eps=1e-6)
        out = paged_attention(q, kv, 0, batch, rule).flatten(1)
        return soft_cap(activation_and_mul(out, Activation.GELU_TANH), 2.0)

    before = kv.clone()
    recording = record(run, Workspace(), (3,))
    assert torch.equal(kv, before)
    ids.copy_(torch.tensor([0, 2, 7]))
    recording.graph.replay(3)
    assert torch.equal(recording.answer, run())


def test_recording_computes_nothing() -> None:
    gate_up, out = torch.randn(5, 64), torch.zeros(5, 32)
    recording = record(lambda: activation_and_mul(gate_up, Activation.SILU, out), Workspace())
    assert recording.answer is out
    assert not out.any()
    recording.graph.replay()
    assert torch.equal(out, activation_and_mul(gate_up, Activation.SILU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_in_panels_can_be_recorded(dtype: torch.dtype) -> None:
    weight, down = pack(torch.randn(192, 64).to(dtype)), pack(torch.randn(64, 96).to(dtype))
    x, gain = torch.randn(3, 64).to(dtype), GAIN.to(dtype)

    def run() -> Tensor:
        return linear(gated_linear(x, weight, norm=RowNorm(gain, 1e-6)), down)

    recording = record(run, Workspace())
    x.copy_(torch.randn(3, 64))
    recording.graph.replay()
    assert torch.equal(recording.answer, run())


@pytest.mark.parametrize(
    ("run", "obstacle"),
    [
        (lambda x: x + 1, "aten.add"),
        (lambda x: x.mul_(2), "aten.mul_"),
        (lambda x: x.T.reshape(-1), "aten."),  # reshape is declared a view, but copies here
        (lambda x: x.to(torch.float64), "aten."),
        (lambda x: linear(x, PackedWeight(x, (32, 32), in_panels=False)), "aten."),
    ],
    ids=["sum", "in place", "reshape", "type", "a product of torch"],
)
def test_calls_that_cannot_be_replayed_are_named(run: Callable[[Tensor], Tensor], obstacle: str) -> None:
    x = torch.randn(32, 32)
    before = x.clone()
    with pytest.raises(NotRecordable, match=rf"^{obstacle}"):
        record(lambda: run(x), Workspace())
    assert torch.equal(x, before)
    run(x)  # outside of a recording it works as before


def test_a_native_function_that_cannot_be_replayed_is_named() -> None:
    weight = torch.randn(64, 64).bfloat16()
    with pytest.raises(NotRecordable, match="baton_has_linear"), CallRecorder():
        pack(weight)


def test_memory_is_reused_once_no_tensor_uses_it() -> None:
    workspace = Workspace()
    first = workspace.empty((100,), torch.float32)
    view, address = first[10:].view(3, 30), first.data_ptr()
    del first
    second = workspace.empty((100,), torch.float32)
    assert second.data_ptr() != address, "a view still uses that memory"
    del view
    assert workspace.empty((128,), torch.float32).data_ptr() == address
    assert workspace.empty((0, 4), torch.bfloat16).shape == (0, 4)


def test_an_answer_survives_later_recordings() -> None:
    workspace = Workspace()
    x, y = torch.randn(5, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    first, second = record(lambda: chain(x), workspace), record(lambda: chain(y), workspace)
    for _ in range(2):
        first.graph.replay()
        second.graph.replay()
        assert torch.equal(first.answer, chain(x))
        assert torch.equal(second.answer, chain(y))


def test_calls_of_other_threads_are_not_recorded() -> None:
    x = torch.randn(5, 64).bfloat16()
    with CallRecorder() as notes:
        other = threading.Thread(target=chain, args=(x,))
        other.start()
        other.join(timeout=60)
    assert notes.calls == []
