"""Tensors of draft layers: read where the layer is run, and unread elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.engine.hf_config.errors import WeightsError
from baton.engine.models import check_weights, load_config

from ...helpers.draft_layers import with_draft_layer


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_next"])
def test_a_checkpoint_with_a_draft_layer_is_accounted_for_with_it_and_without(
    tmp_path: Path, architecture: str
) -> None:
    folder = with_draft_layer(tmp_path / "model", architecture)
    for drafts in (False, True):
        check_weights(load_config(folder, drafts=drafts))
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if name.endswith(("hnorm.weight", "pre_fc_norm_hidden.weight")))
    save_file({name: each for name, each in tensors.items() if name != lost}, folder / "model.safetensors")
    check_weights(load_config(folder))
    with pytest.raises(WeightsError, match=f"1 missing: {lost}"):
        check_weights(load_config(folder, drafts=True))
