"""Tensors of draft layers are loaded if the layer is run, and ignored otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.engine.hf_config.errors import UnsupportedModel, WeightsError
from baton.engine.models import check_weights, load_config

from ...helpers.checkpoints import edit_config, write_checkpoint
from ...helpers.draft_layers import with_draft_layer
from ...helpers.mimo_draft_layers import write_mimo


@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm4_moe", "qwen3_next", "mimo_v2_flash"])
def test_a_checkpoint_with_a_draft_layer_passes_the_check_with_and_without_drafts(
    tmp_path: Path, architecture: str
) -> None:
    folder = tmp_path / "model"
    if architecture == "mimo_v2_flash":
        write_mimo(folder)
    else:
        with_draft_layer(folder, architecture)
    config = load_config(folder)
    check_weights(config)
    check_weights(config.with_draft_layers())
    lost = _remove_a_norm(folder)
    check_weights(load_config(folder))
    with pytest.raises(WeightsError, match=f"1 missing: {lost}"):
        check_weights(load_config(folder).with_draft_layers())


@pytest.mark.parametrize(
    ("architecture", "path"),
    [("deepseek_v3", "model.layers.3"), ("glm4_moe", "model.layers.3"), ("qwen3_next", "mtp")],
)
def test_a_checkpoint_that_lacks_the_draft_layer_of_its_config_is_refused_by_name(
    tmp_path: Path, architecture: str, path: str
) -> None:
    """Converted checkpoints often leave it out."""
    folder = write_checkpoint(tmp_path / "model", architecture)
    edit_config(folder, num_nextn_predict_layers=1)
    check_weights(load_config(folder))
    with pytest.raises(UnsupportedModel, match=f"'mtp' needs draft layers, and there are no tensors {path}"):
        load_config(folder).with_draft_layers()


def _remove_a_norm(folder: Path) -> str:
    """Remove a norm of a draft layer from the checkpoint, and return its name."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        ends = ("hnorm.weight", "pre_fc_norm_hidden.weight")
        if (lost := next((name for name in tensors if name.endswith(ends)), None)) is not None:
            break
    assert lost is not None
    del tensors[lost]
    save_file(tensors, file)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text())
        del listed["weight_map"][lost]
        index.write_text(json.dumps(listed))
    return lost
