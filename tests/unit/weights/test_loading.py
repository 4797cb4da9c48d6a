"""Every tensor of a checkpoint is loaded once, every parameter is filled once, and mismatches are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.hf_config.errors import WeightsError
from baton.engine.layers.base import Layer
from baton.engine.layers.decoder import CausalLM
from baton.engine.models import load_config, load_model, make_model

from ...helpers.checkpoints import ARCHITECTURES, TIED, edit_config, write_checkpoint
from ...helpers.paged import PagedRun

Change = Callable[[dict[str, Tensor]], None]
Q = "model.layers.1.self_attn.q_proj.weight"


def rewrite(folder: Path, change: Change) -> Path:
    """Apply a change to the tensors of an unsharded checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, **given: str) -> CausalLM:
    return load_model(load_config(folder, **given))


def logits(model: CausalLM) -> Tensor:
    """Return the logits of four tokens, which depend on every parameter of the model."""
    return model.logits(model(torch.tensor([3, 1, 4, 1]), PagedRun(model, 1, 4).caches([0], [4], [4])))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "qwen3")


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sharded_checkpoint_loads_as_an_unsharded_one(architecture: str, tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", architecture)
    shards = write_checkpoint(tmp_path / "shards", architecture, shards=4)
    assert len(list(shards.glob("*.safetensors"))) >= 4
    assert torch.equal(logits(load(whole)), logits(load(shards)))
    assert load_config(whole).identity == load_config(shards).identity


def test_shards_without_an_index_are_found(tmp_path: Path) -> None:
    shards = write_checkpoint(tmp_path / "shards", "llama", shards=3)
    expected = logits(load(shards))
    (shards / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(load(shards)), expected)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(Q))
    with pytest.raises(WeightsError, match=rf"1 missing: {Q}"):
        load(folder)


def test_a_tensor_that_the_model_does_not_have_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(2)}))
    with pytest.raises(WeightsError, match=r"1 not part of the model: model\.layers\.3\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q: tensors[Q][:-1].contiguous()}))
    with pytest.raises(WeightsError, match=rf"of another shape: {Q} \[127, 64\] instead of \[128, 64\]"):
        load(folder)


def test_a_tensor_of_integers_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q: tensors[Q].to(torch.int32)}))
    with pytest.raises(WeightsError, match=rf"1 of another type: {Q} I32 instead of F64, F32"):
        load(folder)


def test_all_mismatches_are_reported_at_once_and_before_anything_is_read(folder: Path) -> None:
    def rename_layer(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.2." in name]:
            tensors[name.replace(".layers.2.", ".blocks.2.")] = tensors.pop(name)

    rewrite(folder, rename_layer)
    config = load_config(folder)

    def progress(done_bytes: int, total_bytes: int) -> None:
        raise AssertionError("a tensor was read")

    with pytest.raises(WeightsError, match=r"11 missing: .* and 3 more; 11 not part of the model: .*blocks\.2"):
        load_model(config, progress=progress)


def test_stored_rope_frequencies_are_ignored(folder: Path) -> None:
    expected = logits(load(folder))
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}))
    assert torch.equal(logits(load(folder)), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", TIED)
def test_a_tied_head_is_the_embedding_even_if_a_second_copy_is_stored(architecture: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, architecture, tie_word_embeddings=True)
    expected = logits(load(folder))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(load(folder)), expected)


def test_a_stored_head_that_differs_from_the_tied_embedding_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)

    def store_head(change: Callable[[Tensor], Tensor]) -> Change:
        return lambda tensors: tensors.update({"lm_head.weight": change(tensors["model.embed_tokens.weight"].clone())})

    rewrite(folder, store_head(lambda weight: weight))
    load(folder)
    assert not caplog.messages
    for change in (torch.neg, Tensor.bfloat16):
        rewrite(folder, store_head(change))
        load(folder)
        (message,) = caplog.messages
        assert message.startswith(f"{folder}: lm_head.weight differs from model.embed_tokens.weight")
        caplog.clear()


def test_an_untied_head_must_be_there(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
        load(folder)
    edit_config(folder, tie_word_embeddings=True)
    load(folder)


def test_weights_are_converted_to_the_requested_dtype(folder: Path, tmp_path: Path) -> None:
    half = write_checkpoint(tmp_path / "half", "qwen3", dtype="bfloat16")
    assert torch.equal(logits(load(folder, dtype="bfloat16")), logits(load(half)))


def test_progress_ends_at_the_size_of_the_model(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(load_config(folder), progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_has_exactly_the_tensors_that_transformers_saves(architecture: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, architecture)
    model = make_model(load_config(folder))
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert {slot.name: slot.shape for slot in model.slots()} == stored


def parameters(layer: Layer) -> list[Tensor]:
    """Return the parameters that remain after packing: norms, biases, the embedding."""
    own = [parameter.data for _, parameter in layer.parameters() if parameter.has_data]
    return own + [tensor for _, child in layer.children() for tensor in parameters(child)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dummy_weights_are_equal_for_equal_seeds_only_and_need_no_tensors(architecture: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, architecture)
    (folder / "model.safetensors").unlink()

    def dummy(seed: int) -> CausalLM:
        return load_model(load_config(folder, load_format="dummy", seed=seed))

    first = logits(dummy(1))
    assert first.isfinite().all()
    assert first.std() > 0
    assert torch.equal(first, logits(dummy(1)))
    assert not torch.equal(first, logits(dummy(2)))
    norms = [tensor for tensor in parameters(dummy(1)) if abs(float(tensor.float().mean()) - 1.0) < 0.05]
    assert len(norms) >= 2 * 3 + 1


def test_dummy_weights_have_no_two_equal_rows(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", num_hidden_layers=1, vocab_size=20_000)
    model = load_model(load_config(folder, load_format="dummy"))
    embedding = model.model.embed_tokens.weight.data  # 1.28 M numbers, more than the pool of random numbers holds
    assert len(embedding.unique(dim=0)) == 20_000


def test_the_error_of_a_folder_without_safetensors_lists_its_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"no \*\.safetensors.*pytorch_model\.bin.*convert"):
        load(folder)


def test_a_cut_off_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match=r"model\.safetensors is cut off: tensor "):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (7).to_bytes(8, "little") + b"{broken"])
def test_a_file_that_is_no_safetensors_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", shards=3)
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(WeightsError, match=rf"not there: {lost.name}"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(WeightsError, match="not an index"):
        load(folder)


@pytest.mark.parametrize("home", [0, -1])
def test_of_a_tensor_in_two_files_the_one_in_the_index_is_loaded(tmp_path: Path, home: int) -> None:
    folder = write_checkpoint(tmp_path, "llama", shards=3)
    expected = logits(load(folder))
    index_file = folder / "model.safetensors.index.json"
    homes = json.loads(index_file.read_text())["weight_map"]
    files = sorted(folder.glob("*.safetensors"))
    name = next(name for name, file in homes.items() if file == files[home].name)
    other = load_file(files[-1 - home])
    save_file({**other, name: load_file(files[home])[name] + 0.5}, files[-1 - home])
    assert torch.equal(logits(load(folder)), expected)
    index_file.unlink()
    with pytest.raises(WeightsError, match=rf"{name}.*again in"):
        load(folder)


def test_the_identity_of_a_fine_tune_differs_from_its_base(folder: Path) -> None:
    base = load_config(folder).identity

    def nudge(tensors: dict[str, Tensor]) -> None:
        tensors[Q] = tensors[Q] * 1.001

    assert load_config(rewrite(folder, nudge)).identity != base
