"""The ranks' shares of a layer make up the layer: in outputs, in the residual stream, and in reads of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from baton.engine.hf_config.errors import WeightsError
from baton.engine.hf_config.quantization import Quantization
from baton.engine.layers.base import Layer, Parameter, Share, Slot
from baton.engine.layers.embedding import Embedding, Head, TiedHead
from baton.engine.layers.fp8 import Fp8Linear
from baton.engine.layers.linear import Linear, MergedLinear
from baton.engine.layers.method import PLAIN, LinearMethod
from baton.engine.layers.mlp import GatedMLP
from baton.engine.layers.norm import ResidualStream, RMSNorm
from baton.engine.models import load_config, load_model
from baton.engine.parallel.groups import ParallelGroups
from baton.engine.weights.loader import use_quantized_methods
from baton.kernels import fp8

from ...helpers.checkpoints import write_checkpoint
from ...helpers.thread_groups import run_ranks

DTYPE = torch.float32


def tensors_of(layer: Layer) -> dict[str, torch.Tensor]:
    """Return random tensors for the layer's slots, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    return {
        slot.name: torch.randn(slot.shape, generator=generator) / slot.shape[-1] ** 0.5 for slot in layer.slots("l")
    }


def ready(layer: Layer, tensors: dict[str, torch.Tensor]) -> Layer:
    layer.allocate("cpu", DTYPE)
    for slot in layer.slots("l"):
        slot.place(tensors[slot.name])
    layer.finish()
    return layer


def divided(make: Callable[[], Layer], tensors: dict[str, torch.Tensor], groups: ParallelGroups) -> Any:
    layer = make()
    layer.divide(groups)
    return ready(layer, tensors)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_feed_forward_layer_is_the_sum_of_its_shares(ranks: int, bias: bool) -> None:
    def make() -> Layer:
        return GatedMLP(32, 48, bias=bias)

    tensors, x = tensors_of(make()), torch.randn(5, 32)
    whole: Any = ready(make(), tensors)
    for share in run_ranks(lambda groups: divided(make, tensors, groups)(x), tp=ranks):
        torch.testing.assert_close(share, whole(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_stream_of_divided_layers_is_the_same_on_every_rank(in_place: bool) -> None:
    """The stream is added once, not once per rank, also in place."""

    def make() -> Layer:
        return GatedMLP(32, 48, bias=True)

    tensors, x = tensors_of(make()), torch.randn(6, 32)

    def run(layer: Any) -> torch.Tensor:
        norm = RMSNorm(32, 1e-6)
        ready(norm, {"l.weight": torch.ones(32)})
        stream = ResidualStream(x.clone(), in_place=in_place)
        for _ in range(3):
            given, its_norm = stream.read(norm)
            stream.take(layer(given, norm=its_norm, add_to=stream.target))
        return stream.normed(norm)

    expected = run(ready(make(), tensors))
    for share in run_ranks(lambda groups: run(divided(make, tensors, groups)), tp=2):
        torch.testing.assert_close(share, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [256, 250, 40, 3])
def test_embeddings_and_heads_divided_by_vocabulary_equal_whole_ones(vocab_size: int) -> None:
    ids = torch.arange(vocab_size).repeat(2)
    hidden = torch.randn(5, 32)
    for make in (lambda: Embedding(vocab_size, 32), lambda: Head(32, vocab_size)):
        tensors = tensors_of(make())
        (weight,) = tensors.values()

        def work(groups: ParallelGroups, make: Any = make, tensors: Any = tensors) -> list[torch.Tensor]:
            layer = divided(make, tensors, groups)
            if isinstance(layer, Head):
                return [layer.logits(hidden), layer.logits(hidden, out=torch.full((5, vocab_size), torch.nan))]
            head = TiedHead(layer)
            head.finish()
            return [layer(ids), head.logits(hidden)]

        for first, second in run_ranks(work, tp=4):
            expected = weight[ids] if len(first) == len(ids) else hidden @ weight.T
            torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(second, hidden @ weight.T, rtol=1e-5, atol=1e-5)


class Pair(Layer):
    """Two merged layers followed by a third, whose shares may not cut a block of scales."""

    def __init__(self) -> None:
        self.up = MergedLinear(256, {"a": 512, "b": 256})
        self.down = Linear(512, 256)

    def divide(self, groups: ParallelGroups) -> None:
        share = Share.part(512, groups.tp)
        self.up.keep_parts({"a": share, "b": Share.part(256, groups.tp)})
        self.down.keep_columns(share, groups.tp)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)[:, : self.down.in_features])


@pytest.mark.parametrize("in_blocks", [True, False])
def test_fp8_weights_are_divided_with_their_scales(in_blocks: bool) -> None:
    quantization = Quantization(in_blocks=in_blocks, scale_name="weight_scale", ignored=())
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in (("a", (512, 256)), ("b", (256, 256)), ("down", (256, 512))):
        weight = fp8.quantize_weight(torch.randn(shape, generator=generator) / 16, in_blocks=in_blocks)
        tensors[f"l.{name}.weight"] = weight.data
        tensors[f"l.{name}.weight_scale"] = weight.scale if in_blocks else weight.scale[:, None]

    def run(groups: ParallelGroups = ParallelGroups()) -> torch.Tensor:
        pair = Pair()
        pair.divide(groups)
        use_quantized_methods(pair, quantization, lambda name: True)
        ready(pair, tensors)
        return pair(x)

    x = torch.randn(3, 256, generator=generator)
    whole = run()
    for share in run_ranks(run, tp=2):  # a rank's share of a token's values has its own scale, so its rounding differs
        assert (share - whole).norm() < 0.05 * whole.norm()


def test_layers_whose_blocks_ranks_would_cut_are_named_and_stay_plain() -> None:
    quantization = Quantization(in_blocks=True, scale_name="weight_scale", ignored=())

    def run(groups: ParallelGroups) -> tuple[list[str], list[LinearMethod]]:
        pair = Pair()
        pair.divide(groups)
        return use_quantized_methods(pair, quantization, lambda name: True), [pair.up.method, pair.down.method]

    for plain, methods in run_ranks(run, tp=4):  # each rank has 64 rows of b
        assert plain == ["up"]
        assert methods == [PLAIN, Fp8Linear(quantization)]


def test_a_slot_takes_a_whole_tensor_or_its_share() -> None:
    parameter = Parameter(4, 6)
    parameter.keep(1, Share(2, 2, 6))
    parameter.allocate("cpu", DTYPE)
    tensor = torch.arange(24.0).view(4, 6)
    slot = parameter.slot("w")
    assert (slot.shape, slot.share_shape, slot.num_elements) == ((4, 6), (4, 2), 8)
    slot.place(tensor)
    assert torch.equal(parameter.data, tensor[:, 2:4])
    slot.place(10 * tensor[slot.index((4, 6))])
    assert torch.equal(parameter.data, 10 * tensor[:, 2:4])
    with pytest.raises(WeightsError, match=r"w has shape \[4, 3\], must have \[4, 6\]"):
        slot.place(tensor[:, :3])


def test_ranks_read_their_share_of_a_checkpoint_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import baton.engine.weights.loader as loader

    folder = write_checkpoint(tmp_path, "qwen3")
    config = load_config(folder)
    read: list[int] = []

    def counting(file: Path, framework: str) -> Any:
        return _Counting(safe_open(file, framework=framework), read)

    monkeypatch.setattr(loader, "safe_open", counting)
    model = load_model(config)
    whole = sum(read)
    of_norms = sum(slot.num_elements for slot in model.slots() if "norm" in slot.name)  # weights that every rank has
    read.clear()
    run_ranks(lambda groups: load_model(config, groups=groups), tp=2)
    assert sum(read) == whole + of_norms


class _Counting:
    """A safetensors file that counts the elements that are read."""

    def __init__(self, file: Any, read: list[int]) -> None:
        self._file = file
        self._read = read

    def __enter__(self) -> _Counting:
        self._file = self._file.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.__exit__(*exception)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        self._read.append(tensor.numel())
        return tensor

    def get_slice(self, name: str) -> Any:
        return _CountingSlice(self._file.get_slice(name), self._read)


class _CountingSlice:
    def __init__(self, part: Any, read: list[int]) -> None:
        self._part = part
        self._read = read

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._part[index]
        self._read.append(tensor.numel())
        return tensor


def test_tensors_of_other_ranks_must_exist_and_are_not_read(tmp_path: Path) -> None:
    """Every rank refuses a checkpoint that lacks a tensor of another rank."""
    folder = write_checkpoint(tmp_path, "llama")
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as tensors:
        kept = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    slot = Slot.elsewhere("extra.weight", (3, 5), Parameter(1))
    assert (slot.num_elements, slot.accepts((3, 5)), slot.accepts((5, 3))) == (0, True, False)
    del kept["model.layers.2.mlp.down_proj.weight"]
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"1 missing: model\.layers\.2\.mlp\.down_proj\.weight"):
        run_ranks(lambda groups: load_model(load_config(folder), groups=groups), tp=2)
