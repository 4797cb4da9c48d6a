"""The model's configuration: its shapes, its types, and what a token keeps in its caches.

    config.json ──ConfigRules of its architecture (`config_reader.py`)──> ModelConfig ──> layers, `baton plan`

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.layout import (
    CacheKind,
    CacheLayout,
    LayerCache,
    LayerCaches,
    LayerState,
    StateLayout,
    StatePart,
    StateRows,
)
from .attention import HeadShape, LatentShape, LinearAttentionShape, WindowRule
from .errors import UnsupportedModel
from .experts import ExpertsConfig
from .folder import GenerationDefaults
from .keys import NEWER, Keys
from .mamba import ATTENTION, MAMBA, MLP, MambaShape
from .quantization import Quantization
from .rope import NoRope, Rope

DTYPES = ("float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # of 8-bit formats only E4M3: its values are near enough to each other


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors and caps that a family reads from its config. By default there are none."""

    embedding: float = 1.0  # of the embedding's rows
    score: float | None = None  # of attention's scores; None: head_dim ** -0.5
    score_cap: float | None = None  # scores become cap * tanh(score / cap)
    logit_cap: float | None = None  # and so do logits
    rounds_embedding: bool = field(default=True, metadata=NEWER)  # the factor, to the model's dtype
    logit: float = field(default=1.0, metadata=NEWER)
    attention_output: float = field(default=1.0, metadata=NEWER)
    mlp_gate: float = field(default=1.0, metadata=NEWER)  # of what its activation is applied to
    mlp_output: float = field(default=1.0, metadata=NEWER)


@dataclass(frozen=True)
class LayerInputShape:
    """Embeddings that every layer has for itself, beside those that the stream begins with."""

    vocab_size: int
    width: int


def keys_and_values_or_shared(config: ModelConfig, layer: int) -> LayerCaches:
    """Keep keys and values; nothing in layers that read those of another."""
    return keys_and_values(config, layer) if config.kv_source(layer) == layer else ()


def keys_and_values(config: ModelConfig, layer: int) -> tuple[LayerCache]:
    """Keep a key and a value of every KV head, of the layer's window only where the config says so."""
    window = config.layer_windows[layer] if config.window_caches else None
    if window is not None and window >= config.max_model_len:
        window = None
    heads = config.heads_of(layer)
    is_even = heads.key_dim == heads.value_dim
    cache = LayerCache(
        kind=CacheKind.FULL if window is None else CacheKind.WINDOW,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.key_dim if is_even else heads.key_dim + heads.value_dim,
        num_planes=2 if is_even else 1,  # rows of a key and its value: `kernels.kv_rows`
        dtype=config.cache_dtype,
        window=window,
    )
    return (cache,)


def latents(config: ModelConfig, layer: int) -> tuple[LayerCache]:
    """Keep a latent and the rotated part of a key, which all heads share."""
    assert config.latent is not None, "a config of this family has latents"
    cache = LayerCache(
        kind=CacheKind.LATENT,
        num_kv_heads=1,
        num_planes=1,
        head_dim=config.latent.rank + config.latent.rope_dim,
        dtype=config.cache_dtype,
    )
    return (cache,)


def keys_and_values_or_states(config: ModelConfig, layer: int) -> LayerCaches:
    """Keep keys and values; in layers of linear attention the last inputs of the convolution, and a state a head."""
    return linear_states(config, layer) or keys_and_values(config, layer)


def latents_or_states(config: ModelConfig, layer: int) -> LayerCaches:
    """Keep latents; in layers of linear attention the last inputs of the convolution, and a state a head."""
    return linear_states(config, layer) or latents(config, layer)


def linear_states(config: ModelConfig, layer: int) -> tuple[()] | tuple[LayerState]:
    """Return the state of a layer of linear attention; of another one nothing."""
    shape = config.linear
    if shape is None or not shape.layers[layer]:
        return ()
    heads = shape.num_value_heads
    state = LayerState(
        (
            StatePart(
                (shape.conv_channels, shape.conv_width - 1),
                config.dtype,
                rows=(*[StateRows(shape.num_key_heads, shape.key_dim)] * 2, StateRows(heads, shape.value_dim)),
            ),
            StatePart((heads, shape.key_dim, shape.value_dim), "float32"),
        )
    )
    return (state,)


def caches_of_blocks(config: ModelConfig, layer: int) -> LayerCaches:
    """Keep keys and values where a layer has attention, and where it has Mamba-2, its convolution's tail and state.

    Heads divide over ranks, and so do the groups that share B and C, or ranks share these.
    """
    shape = config.mamba
    assert shape is not None, "a config of this family has Mamba-2"
    cache = keys_and_values(config, layer) if shape.has(layer, ATTENTION) else ()
    if not shape.has(layer, MAMBA):
        return cache
    heads, groups = StateRows(shape.num_heads, shape.head_dim), StateRows(shape.num_groups, shape.state_dim)
    state = LayerState(
        (
            StatePart((shape.conv_channels, shape.conv_width - 1), config.dtype, (heads, groups, groups)),
            StatePart((shape.num_heads, shape.head_dim, shape.state_dim), "float32"),
        )
    )
    return (*cache, state)


def _inputs_of_states(config: ModelConfig, states: StateLayout) -> StateLayout:
    """Return what layers with these states read of one token: of each its convolution's input, and what its recurrence
    takes to change a state. That is keys, values, decays and betas of a delta rule; x, B and time steps of Mamba-2.
    """
    (convolution, _), linear, mamba = states.parts, config.linear, config.mamba
    if linear is not None:
        keys, heads = (linear.num_key_heads, linear.key_dim), (linear.num_value_heads,)
        read = [keys, (*heads, linear.value_dim), heads if linear.gate_rank is None else keys, heads]
    else:
        assert mamba is not None, "a model with states has one of them"
        read = [(mamba.num_heads, mamba.head_dim), (mamba.num_groups, mamba.state_dim), (mamba.num_heads,)]
    parts = (
        StatePart((convolution.shape[0],), config.dtype, convolution.sections),
        *(StatePart(shape, config.dtype) for shape in read),
    )
    return StateLayout(model=config.identity, num_layers=states.num_layers, parts=parts)


def no_scales(keys: Keys) -> Scales:
    return Scales()


def no_tensors(config: ModelConfig) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape:
    """An EAGLE-3 head, beside the sizes of its layer."""

    vocab_size: int  # tokens that it knows
    layers: tuple[int, ...]  # of the model, whose inputs it reads
    goes_on_normed: bool  # whether its layer adds to the hidden state behind its norm


@dataclass(frozen=True, kw_only=True)
class DraftRules:
    """The places and the names of a family's draft layers, the first of which guesses the token behind the next one.

    `path` of each holds the layer itself as `layer`, the norms of the two that it reads, of an embedding and of a
    hidden state, their projection, and the norm behind the layer.
    """

    path: Callable[[ModelConfig, int], str]  # by the number of the draft layer
    layer: str  # "": its blocks lie at `path`
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    copies: tuple[str, ...] = ()  # patterns of tensors below `path` that repeat the model's own
    goes_on_normed: bool = False  # whether a further guess begins from what went through `norm`
    # Whether each layer guesses one token, from the model's hidden states; else the first guesses again and again.
    one_each: bool = False
    reads_total: bool = False  # whether the model's hidden states are read before its last norm
    has_window: bool = False  # whether attention has the model's window; else it sees all keys
    is_dense: bool = False  # whether its MLP is no mixture, in models most of whose layers have one


@dataclass(frozen=True, kw_only=True)
class ConfigRules:
    """The reading of one architecture's config, and what a token keeps in its caches."""

    architecture: str  # its name in `architectures` of config.json
    # Architectures that also read images and have this one for their text, with the `model_type` of their text_config.
    inside: Mapping[str, str] = field(default_factory=dict)
    cache: Callable[[ModelConfig, int], LayerCaches]  # what the layer of this index keeps
    # Defaults of `transformers` for keys that a config.json leaves out, where families disagree or a null says no.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: WindowRule | None = None  # None: every layer sees all keys, whatever the config says
    # Of layers that see all keys, and of those with a window; None: all have `num_key_value_heads` of `head_dim`.
    heads: Callable[[Keys], tuple[HeadShape, HeadShape]] | None = None
    # The layer whose keys and values each reads, given their windows; None: each its own.
    kv_sources: Callable[[Keys, tuple[int | None, ...]], tuple[int, ...]] | None = None
    layer_inputs: Callable[[Keys], LayerInputShape | None] | None = None  # None: there are none
    experts: Callable[[Keys, int], ExpertsConfig | None] | None = None  # of so many layers; None: there are none
    latent: Callable[[Keys], LatentShape] | None = None  # None: keys and values are projected and kept as such
    linear: Callable[[Keys, int], LinearAttentionShape] | None = None  # of so many layers; None: there is none
    mamba: Callable[[Keys, int], MambaShape] | None = None  # of so many layers; None: there is none
    num_layers: Callable[[Keys], int] | None = None  # None: `num_hidden_layers`
    rotates: Callable[[Keys], bool] | None = None  # whether queries and keys are rotated; None: always
    rotary_fraction: float | None = None  # of a head's dimensions, where a config leaves it out; None: always all
    scales: Callable[[Keys], Scales] = no_scales
    has_gated_heads: bool = False  # whether attention has a gate for every value of a head, projected beside its query
    norm_offset: float = 0.0  # added to the weights of norms, which are stored without it
    activation: str = "silu"  # that its layers compute; a config that names another is refused
    activation_key: str = "hidden_act"  # under which a config names it
    norm_eps_key: str = "rms_norm_eps"
    mlp_width_key: str = "intermediate_size"  # of MLPs that are no experts
    names: Mapping[str, str] = field(default_factory=dict)  # in checkpoints, of `model`, `embed_tokens` and `norm`
    key_names: Mapping[str, str] = field(default_factory=dict)  # in its configs, and by which they are read here
    ignored_tensors: Callable[[ModelConfig], tuple[str, ...]] = no_tensors  # patterns of tensors that go unread
    draft: DraftRules | None = None  # None: layers behind the last one go unread


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model, the type it computes in, the longest sequence it serves, and which weights it has."""

    folder: Path
    architecture: str  # its name in `architectures` of config.json
    rules: ConfigRules = field(repr=False, compare=False)  # of its architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    latent: LatentShape | None  # None: keys and values are projected and kept as such
    linear: LinearAttentionShape | None = None  # None: no layer has linear attention
    mamba: MambaShape | None = None  # None: no layer has Mamba-2
    full_heads: HeadShape | None = None  # of layers that see all keys; None: `num_kv_heads` of `head_dim`
    window_heads: HeadShape | None = None  # of layers with a window, as `full_heads`
    kv_sources: tuple[int, ...] = ()  # of each layer: the one whose keys and values it reads; (): its own
    doubles_shared_mlps: bool = False  # whether layers that read another's keys and values have MLPs of twice the width
    layer_inputs: LayerInputShape | None = None
    rotary_fraction: float = 1.0  # of a head's dimensions, those that are rotated
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: Rope
    window_rope: Rope | None  # of layers with a window; None: `rope`
    moe: ExpertsConfig | None  # None: every feed-forward layer is dense
    num_draft_layers: int  # behind the last layer, for guessing further tokens, in the checkpoint
    drafts: int = 0  # how many of these are run: they are then the layers of index `num_layers` and more
    draft_model: ModelConfig | None = None  # a smaller one or a head, which guesses further tokens
    eagle3: Eagle3Shape | None = None  # None: it is no such head
    quantization: Quantization | None  # None: plain weights
    cache_dtype: str  # of keys and values in the cache: `dtype`, or "float8_e4m3fn"
    cache_scales: bool  # whether the checkpoint says what cached values are to be multiplied by
    scales: Scales
    layer_windows: tuple[int | None, ...]  # of each layer: how many keys a query sees, itself included; None: all
    window_caches: bool  # whether layers with a window keep no more than that
    dtype: str  # "float32", "bfloat16" or "float16"
    max_model_len: int  # tokens, prompt and output together
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    load_format: str
    seed: int  # of dummy weights
    identity: str  # equal where the weights and what is computed with them are; 32 hex digits
    is_text_part: bool = False  # its checkpoint is one of a model that also reads images: `config_reader.text_part`

    @cached_property
    def caches(self) -> CacheLayout:
        """The groups of the whole model's layers, by what they keep of a sequence."""
        layers = range(self.num_run_layers)
        return CacheLayout.of_layers(self.identity, [self.rules.cache(self, layer) for layer in layers])

    @property
    def drafted_from(self) -> tuple[int, ...]:
        """The layers whose inputs its head or its draft layers read; (): there are none, or they read the last hidden
        states. The layer behind the last one stands for what goes into the last norm.
        """
        head = None if self.draft_model is None else self.draft_model.eagle3
        if head is not None:
            return head.layers
        rules = self.rules.draft
        return (self.num_layers,) if self.drafts and rules is not None and rules.reads_total else ()

    @property
    def num_run_layers(self) -> int:
        """The number of decoder layers, with the draft layers that are run."""
        return self.num_layers + self.drafts

    def with_drafts(self) -> ModelConfig:
        """Return the same with the first draft layer, or with all of them where each guesses one token.

        Raises `UnsupportedModel`.
        """
        rules = self.rules.draft
        if rules is None:
            raise UnsupportedModel(f"config.json: speculation by 'mtp' is not supported for {self.architecture}")
        if not self.num_draft_layers:
            raise UnsupportedModel("config.json: speculation by 'mtp' needs draft layers, and there are none")
        moe, linear, count = self.moe, self.linear, self.num_draft_layers if rules.one_each else 1
        window = next(filter(None, self.layer_windows), None) if rules.has_window else None
        is_sparse = moe is not None and any(moe.sparse_layers) and not rules.is_dense
        return replace(
            self,
            drafts=count,
            layer_windows=(*self.layer_windows, *[window] * count),
            moe=moe and replace(moe, sparse_layers=(*moe.sparse_layers, *[is_sparse] * count)),
            linear=linear and replace(linear, layers=(*linear.layers, *[False] * count)),
        )

    @cached_property
    def draft_inputs(self) -> Mapping[int, StateLayout]:
        """Inputs of one token that layers of each group with states read, as a slot of them: kept of drafts."""
        states = {
            n: group.blocks for n, group in enumerate(self.caches.groups) if isinstance(group.blocks, StateLayout)
        }
        return {number: _inputs_of_states(self, layout) for number, layout in states.items()}

    def heads_of(self, layer: int) -> HeadShape:
        """Return the heads of a layer with attention to keys and values."""
        given = self.full_heads if self.layer_windows[layer] is None else self.window_heads
        return given or HeadShape(self.num_kv_heads, self.head_dim, self.head_dim)

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: mostly its own."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def mlp_width(self, layer: int) -> int:
        """Return the width of a layer's MLP, where that is no mixture."""
        doubles = self.doubles_shared_mlps and self.kv_source(layer) != layer
        return self.intermediate_size * (2 if doubles else 1)

    @property
    def head_shapes(self) -> tuple[HeadShape, ...]:
        """The kinds of heads that layers have, each once."""
        return tuple(dict.fromkeys(self.heads_of(layer) for layer in range(self.num_run_layers)))

    @property
    def num_mlps(self) -> int:
        """The number of layers with an MLP that is neither an expert nor shared by them."""
        if self.mamba is not None:
            return self.mamba.count(MLP)
        if self.moe is None or self.moe.beside_mlp:
            return self.num_run_layers
        return self.moe.sparse_layers.count(False)

    @property
    def has_states(self) -> bool:
        """True where some layers keep recurrent states."""
        linear, mamba = self.linear, self.mamba
        return (linear is not None and any(linear.layers)) or (mamba is not None and mamba.count(MAMBA) > 0)

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rope_dim
        head_dim = self.head_dim if self.full_heads is None else self.full_heads.key_dim
        rotated = int(head_dim * self.rotary_fraction)
        return min(rotated, self.rope.most_dims) if isinstance(self.rope, NoRope) else rotated

    @property
    def window_rotary_dim(self) -> int:
        """The number of dimensions of a head that are rotated in layers with a window."""
        if self.window_heads is None:
            return self.rotary_dim
        return int(self.window_heads.key_dim * self.rotary_fraction)
