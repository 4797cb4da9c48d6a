"""Model families, one file each: how the config is read, what layers cache, and the forward of a layer (README.md).

    config.json ──ConfigRules: defaults, windows, experts, latent──> ModelConfig ──Family.layer──> decoder layers
                                                                        └─ConfigRules.cache──> CacheLayout, `baton plan`

Importing this package does not import torch, and neither does `load_config`; `make_model` and `load_model` do.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engine.hf_config.config_reader import read_config
from baton.engine.hf_config.model_config import ConfigRules, ModelConfig
from baton.engine.layers.decoder_layer import DecoderLayer
from baton.engine.parallel.groups import ALL_ALONE, ParallelGroups

if TYPE_CHECKING:
    import torch

    from baton.engine.layers.decoder import CausalLM
    from baton.engine.layers.eagle3 import Eagle3Head
    from baton.engine.weights import Progress


@dataclass(frozen=True, kw_only=True)
class Family(ConfigRules):
    """One architecture: how its config is read, what its layers cache, and its decoder layer."""

    layer: Callable[[ModelConfig, int], DecoderLayer]  # makes the layer with this index


@functools.cache
def families() -> Mapping[str, Family]:
    """Return every family by its architecture: the `FAMILY` of each module in this package."""
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    found = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.architecture: family for family in found}


# load_config(folder, dtype="auto", ...): `read_config`, with the families of this package.
load_config = functools.partial(read_config, families)


def make_model(config: ModelConfig) -> CausalLM:
    """Return the whole model of `config`, not yet divided over ranks, and without memory."""
    from baton.engine.layers.decoder import CausalLM

    layer = families()[config.architecture].layer
    layers = [layer(config, index) for index in range(config.num_run_layers)]
    return CausalLM(config, layers[: config.num_layers], layers[config.num_layers :])


def load_model(
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    groups: ParallelGroups = ALL_ALONE,
) -> CausalLM:
    """Return the model of `config` on `device`, its weights loaded as `config.load_format` says, ready for steps.

    With several ranks in `groups`, it is the rank's share of the model. `progress` is called with (bytes done, total
    bytes) after each tensor. Raises `WeightsError`, before any weight is read, if the checkpoint's tensors do not match
    the model's parameters exactly.
    """
    from baton.engine.weights.loader import load_weights

    model = make_model(config)
    model.divide(groups)
    load_weights(model, device=device, progress=progress)
    return model


def load_eagle3(
    config: ModelConfig,
    model: CausalLM,
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    groups: ParallelGroups = ALL_ALONE,
) -> Eagle3Head:
    """Return the EAGLE-3 head of `config`, which drafts tokens for `model`, loaded like a model by `load_model`."""
    from baton.engine.layers.eagle3 import Eagle3Head
    from baton.engine.weights.loader import load_weights

    head = Eagle3Head(config, model.model.embed_tokens)
    head.divide(groups)
    load_weights(head, device=device, progress=progress)
    return head


def check_weights(config: ModelConfig) -> None:
    """Raise `WeightsError` if `load_model` would. Reads no weights, only their headers."""
    from baton.engine.weights.loader import check_weights

    check_weights(make_model(config))


def stub_model(config: ModelConfig, *, device: torch.device | str, groups: ParallelGroups = ALL_ALONE) -> CausalLM:
    """Return a model that launches the same kernels as the model of `config`: one layer of each kind, without weights.

    It needs the memory of a few layers, the embedding and the head. `groups` is one of `ParallelGroups.stubs()`.
    """
    from baton.engine.weights.loader import allocate_unfilled

    model = make_model(config)
    model.shorten()
    model.divide(groups)
    allocate_unfilled(model, device=device)
    return model


def stub_eagle3(
    config: ModelConfig, model: CausalLM, *, device: torch.device | str, groups: ParallelGroups = ALL_ALONE
) -> Eagle3Head:
    """Return a stub of an EAGLE-3 head for a stub of its model, as `stub_model` does."""
    from baton.engine.layers.eagle3 import Eagle3Head
    from baton.engine.weights.loader import allocate_unfilled

    head = Eagle3Head(config, model.model.embed_tokens)
    head.divide(groups)
    allocate_unfilled(head, device=device)
    return head
