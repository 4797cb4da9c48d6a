"""Mixtures of experts as a checkpoint describes them: which layers, and how tokens are routed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from .errors import InvalidModelConfig, UnsupportedModel
from .keys import NEWER, Keys


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Routed and shared experts of the layers that have them. The routing is `baton.kernels.moe.RoutingRule`'s."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one routed expert
    intermediate_size_key: str = "moe_intermediate_size"  # its name in config.json
    shared_intermediate_size: int  # of all shared experts together; 0: none
    scoring: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    router_bias: bool = False
    score_correction: bool = False  # whether a bias moves the choice of experts, and not their weights
    expert_biases: bool = False
    gate_slope: float = 1.0  # these three: `baton.kernels.moe.GatedActivation`'s
    gate_limit: float | None = None
    up_shift: float = 0.0
    stored: str = "each"  # in the checkpoint: see `layers.experts`
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # names of an expert's, stored by itself
    sparse_layers: tuple[bool, ...]  # of each layer: whether its feed-forward layer is a mixture
    dense_name: str = field(default="mlp", metadata=NEWER)  # in the checkpoint, of a layer's MLP that is no mixture
    is_gated: bool = field(default=True, metadata=NEWER)  # else a squared ReLU of ups; `projections` names two
    latent_size: int | None = field(default=None, metadata=NEWER)  # of what experts read and give; None: hidden_size
    gate: str = field(
        default="silu", metadata=NEWER
    )  # the activation of gates, `baton.kernels.activation.Activation`'s
    wide_router: bool = field(default=False, metadata=NEWER)  # whether the router's weight stays in float32
    normed_router: bool = field(default=False, metadata=NEWER)  # see `layers.experts.NormedRouter`
    beside_mlp: bool = field(default=False, metadata=NEWER)  # whether layers have an MLP beside their mixture
    top_k_key: str = field(default="num_experts_per_tok", metadata=NEWER)  # its name in config.json


def checked_experts(config: ExpertsConfig, tensors: Collection[str] = ()) -> ExpertsConfig:
    """Return the experts of a model as a family has read them, checked, and stored as the checkpoint's names tell.

    `tensors` are these names, where there is a checkpoint. Raises `ModelError`.
    """
    config = replace(config, stored=_stored(config.stored, tensors), dense_name=_dense_name(config, tensors))
    group_size, rest = divmod(config.num_experts, config.num_groups)
    if config.group_score == "top2" and config.num_groups > 1 and group_size < 2:
        raise InvalidModelConfig(
            f"config.json: groups are rated by their two best experts, but {config.num_experts} experts in "
            f"{config.num_groups} groups (n_group) leave one for each"
        )
    if rest or config.top_groups > config.num_groups or config.top_k > group_size * config.top_groups:
        raise InvalidModelConfig(
            f"config.json: {config.top_k_key}: {config.top_k} experts a token cannot be chosen from "
            f"{config.num_experts} experts in {config.top_groups} of {config.num_groups} equal groups (topk_group of "
            "n_group)"
        )
    return config


def _stored(default: str, tensors: Collection[str]) -> str:
    """Return how a checkpoint stores experts: as the architecture's authors do (`default`), or in another way.

    transformers 5 can write all of a layer as one tensor.
    """
    if any(name.endswith(".experts.gate_up_proj_blocks") for name in tensors):
        return "mxfp4"
    if default == "each" and any(name.endswith(".experts.gate_up_proj") for name in tensors):
        return "stacked"
    return default


def _dense_name(config: ExpertsConfig, tensors: Collection[str]) -> str:
    """Return the name of MLPs: transformers 5 stores Kimi Linear's under that of mixtures, its authors do not."""
    mixtures = "block_sparse_moe"
    return mixtures if any(name.endswith(f".{mixtures}.gate_proj.weight") for name in tensors) else config.dense_name


def sparse_behind_dense(keys: Keys, first: int, num_layers: int) -> tuple[bool, ...]:
    """Return which layers are mixtures: from one on (`first` where the config says nothing), all or every n-th."""
    given = keys.optional_integer("first_k_dense_replace", first)
    every = keys.integer("moe_layer_freq", 1)
    return tuple(layer >= (given or 0) and layer % every == 0 for layer in range(num_layers))


def sparse_as_listed(keys: Keys, num_layers: int) -> tuple[bool, ...] | None:
    """Return which layers `mlp_layer_types` names as mixtures; None without that key. Raises `InvalidModelConfig`."""
    kinds = keys.values.get("mlp_layer_types")
    if kinds is None:
        return None
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in ("sparse", "dense") for kind in kinds)
    ):
        raise InvalidModelConfig(
            f"config.json: 'mlp_layer_types' must name {num_layers} layers 'sparse' or 'dense', not {kinds!r}"
        )
    return tuple(kind == "sparse" for kind in kinds)


def require(keys: Keys, name: str, only: str, model: str) -> None:
    """Raise `UnsupportedModel` where the config says anything else."""
    given = keys.values.get(name) or only
    if given != only:
        raise UnsupportedModel(f"config.json: {name} {given!r} is not supported for {model}, only {only!r}")


def read_num_experts(keys: Keys, names: tuple[str, ...], default: int) -> int:
    """Read a number of experts under whichever of its names a version of transformers has written it."""
    given = next((name for name in names if keys.values.get(name) is not None), names[0])
    return keys.integer(given, default)
