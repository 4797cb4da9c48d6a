"""Mixtures of experts as a checkpoint describes them: which layers have them, and how tokens are routed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from .errors import InvalidModelConfig
from .keys import NEWER, Keys


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Routed and shared experts. Fields about routing are explained at `baton.kernels.moe.RoutingRule`."""

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
    score_correction: bool = False  # whether a bias is added to the scores that choose experts, but not to weights
    expert_biases: bool = False
    gate_slope: float = 1.0  # this and the next two: see `baton.kernels.moe.GatedActivation`
    gate_limit: float | None = None
    up_shift: float = 0.0
    stored: str = "each"  # form in the checkpoint: see `layers.plain_experts`
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # names in checkpoints of form "each"
    sparse_layers: tuple[bool, ...]  # for each layer: whether it is a mixture of experts
    correction_is_row: bool = field(default=False, metadata=NEWER)  # whether that bias is stored as [1, num_experts]
    dense_name: str = field(default="mlp", metadata=NEWER)  # checkpoints' name of the MLP in a dense layer
    is_gated: bool = field(default=True, metadata=NEWER)  # false: squared ReLU of ups, and two `projections`
    latent_size: int | None = field(default=None, metadata=NEWER)  # experts' input and output width; None: hidden_size
    gate: str = field(
        default="silu", metadata=NEWER
    )  # the activation of gates: a value of `baton.kernels.activation.Activation`
    wide_router: bool = field(default=False, metadata=NEWER)  # whether the router's weight stays in float32
    normed_router: bool = field(default=False, metadata=NEWER)  # see `layers.experts.NormedRouter`
    beside_mlp: bool = field(default=False, metadata=NEWER)  # whether layers have an MLP in parallel to their mixture
    top_k_key: str = field(default="num_experts_per_tok", metadata=NEWER)  # its name in config.json


def checked_experts(config: ExpertsConfig, tensors: Collection[str] = ()) -> ExpertsConfig:
    """Return the experts that a family has read, checked and with `stored` and `dense_name` as in the checkpoint.

    `tensors` are the checkpoint's tensor names, if there is one. Raises `ModelError`.
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
    if config.latent_size is not None and config.latent_size < 1:
        raise InvalidModelConfig(f"config.json: 'moe_latent_size' must be at least 1, not {config.latent_size}")
    return config


def _stored(default: str, tensors: Collection[str]) -> str:
    """Return the form in which a checkpoint stores experts: the authors' form (`default`), or another.

    transformers 5 can write all experts of a layer as one tensor.
    """
    if any(name.endswith(".experts.gate_up_proj_blocks") for name in tensors):
        return "mxfp4"
    if default == "each" and any(name.endswith(".experts.gate_up_proj") for name in tensors):
        return "stacked"
    return default


def _dense_name(config: ExpertsConfig, tensors: Collection[str]) -> str:
    """Return the name of dense MLPs: transformers 5, unlike Kimi Linear's authors, gives them the mixtures' name."""
    mixtures = "block_sparse_moe"
    return mixtures if any(name.endswith(f".{mixtures}.gate_proj.weight") for name in tensors) else config.dense_name


def sparse_after_dense(keys: Keys, first: int, num_layers: int) -> tuple[bool, ...]:
    """Return which layers are mixtures: all or every n-th, from one layer on (by default `first`)."""
    given = keys.optional_integer("first_k_dense_replace", first)
    every = keys.integer("moe_layer_freq", 1)
    return tuple(layer >= (given or 0) and layer % every == 0 for layer in range(num_layers))


def sparse_as_listed(keys: Keys, num_layers: int) -> tuple[bool, ...] | None:
    """Return which layers are mixtures by `mlp_layer_types`; None without that key. Raises `InvalidModelConfig`."""
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


def read_num_experts(keys: Keys, names: tuple[str, ...], default: int) -> int:
    """Read a number of experts, whose key has different names in different versions of transformers."""
    given = next((name for name in names if keys.values.get(name) is not None), names[0])
    return keys.integer(given, default)
