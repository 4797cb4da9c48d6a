"""The model's configuration: its shapes, its dtypes, and what each layer caches.

    config.json ──ConfigRules of its architecture (`config_reader.py`)──> ModelConfig ──> layers, `baton plan`

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.layout import CacheLayout, LayerCaches, StateLayout, StatePart
from .attention import AttentionForm, HeadShape, LatentShape, LinearAttentionShape, QKNorm, WindowRule
from .errors import UnsupportedModel
from .experts import ExpertsConfig
from .folder import GenerationDefaults
from .keys import NEWER, Keys
from .mamba import MAMBA, MLP, MambaShape
from .quantization import Quantization
from .rope import NO_ROPE, NoRope, QueryGrowth, Rope, Rotation

DTYPES = ("float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")  # no E5M2: its two bits of mantissa are too few
FP8_CACHE_DTYPE = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Factors and caps that a family reads from its config. By default there are none."""

    embedding: float = 1.0  # factor of the embedding's rows
    score: float | None = None  # factor of attention scores; None: head_dim ** -0.5
    score_cap: float | None = None  # scores become cap * tanh(score / cap)
    logit_cap: float | None = None  # logits become cap * tanh(logit / cap)
    rounds_embedding: bool = field(default=True, metadata=NEWER)  # `embedding` is rounded to the model's dtype
    logit: float = field(default=1.0, metadata=NEWER)
    attention_output: float = field(default=1.0, metadata=NEWER)
    mlp_gate: float = field(default=1.0, metadata=NEWER)  # factor of gates, before the activation
    mlp_output: float = field(default=1.0, metadata=NEWER)


@dataclass(frozen=True)
class LayerInputShape:
    """Sizes of per-layer embeddings, an extra input of every layer for each token (`layers.decoder`)."""

    vocab_size: int
    width: int


def _inputs_of_states(config: ModelConfig, states: StateLayout) -> StateLayout:
    """Return the layout of one token's inputs to layers with these states: of the convolution, then of the recurrence.

    A delta rule changes its state by keys, values, decays and betas; Mamba-2 by x, B and time steps.
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
    """The settings of an EAGLE-3 head, apart from the sizes of its layer."""

    vocab_size: int  # the head's own vocabulary
    layers: tuple[int, ...]  # the model's layers whose inputs the head reads
    goes_on_normed: bool  # whether the head's residual stream begins with the normed hidden state


@dataclass(frozen=True, kw_only=True)
class DraftRules:
    """Checkpoint names and variants of a family's draft layers (`layers.draft_head`).

    Below `path` of a draft layer lie the decoder layer (`layer`), the norms of its two inputs, their projection, and
    the norm after the layer.
    """

    path: Callable[[ModelConfig, int], str]  # given the number of the draft layer
    layer: str  # "": the layer's blocks lie directly at `path`
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    copies: tuple[str, ...] = ()  # patterns of tensors below `path` that repeat the model's own
    goes_on_normed: bool = False  # whether the next draft reads the layer's output after `norm`, instead of before
    # Whether each draft layer drafts one token, from the model's hidden states; else the first drafts all of them.
    one_each: bool = False
    reads_total: bool = False  # whether draft layers read the model's hidden states before its last norm
    has_window: bool = False  # whether attention has the model's window; else it sees all keys
    is_dense: bool = False  # whether draft layers have an MLP in models with mixtures of experts


@dataclass(frozen=True, kw_only=True)
class ConfigRules:
    """The rules of one architecture: the reading of its config, and what its layers cache."""

    architecture: str  # its name in `architectures` of config.json
    # Multimodal architectures whose text model is of this architecture, with the `model_type` of their text_config.
    multimodal: Mapping[str, str] = field(default_factory=dict)
    cache: Callable[[ModelConfig, int], LayerCaches]  # what the layer with this index caches
    # Defaults of `transformers` for missing keys, if they differ between families or from the meaning of null.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    attention: AttentionForm = field(default_factory=AttentionForm)
    windows: WindowRule | None = None  # None: every layer sees all keys, whatever the config says
    # KV heads of layers with full attention and of those with a window; None: `num_key_value_heads` of `head_dim`.
    heads: Callable[[Keys], tuple[HeadShape, HeadShape]] | None = None
    # For each layer the one whose keys and values it reads, given the layers' windows; None: its own.
    kv_sources: Callable[[Keys, tuple[int | None, ...]], tuple[int, ...]] | None = None
    layer_inputs: Callable[[Keys], LayerInputShape | None] | None = None  # None: there are none
    experts: Callable[[Keys, int], ExpertsConfig | None] | None = None  # given the number of layers; None: no experts
    latent: Callable[[Keys], LatentShape] | None = None  # None: keys and values are cached, not latents
    linear: Callable[[Keys, int], LinearAttentionShape] | None = None  # given the number of layers; None: no such layer
    mamba: Callable[[Keys, int], MambaShape] | None = None  # given the number of layers; None: no such layer
    num_layers: Callable[[Keys], int] | None = None  # None: `num_hidden_layers`
    # For each layer whether it rotates queries and keys, given the layers' windows; None, or (): all do.
    rotated_layers: Callable[[Keys, tuple[int | None, ...]], tuple[bool, ...]] | None = None
    grows_queries: bool = False  # whether the config may ask for `QueryGrowth`
    rotary_fraction: float | None = None  # default of the rotated share of a head's dimensions; None: always all
    rotary_dim_key: str | None = None  # key of the number of rotated dimensions, for configs that do not say the share
    only: Mapping[str, Any] = field(default_factory=dict)  # keys that change the result -> the only supported value
    scales: Callable[[Keys], Scales] = no_scales
    norm_offset: float = 0.0  # added to the stored weights of norms
    activation: str = "silu"  # the layers' activation; a config with another one is refused
    activation_key: str = "hidden_act"  # its key in configs
    norm_eps_key: str = "rms_norm_eps"
    mlp_width_key: str = "intermediate_size"  # key of the width of dense MLPs
    names: Mapping[str, str] = field(default_factory=dict)  # checkpoints' names of `model`, `embed_tokens` and `norm`
    key_names: Mapping[str, str] = field(default_factory=dict)  # key in its configs -> key that the readers here know
    ignored_tensors: Callable[[ModelConfig], tuple[str, ...]] = no_tensors  # patterns of tensors that are not loaded
    draft: DraftRules | None = None  # None: the checkpoint's draft layers are not loaded


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model's architecture and sizes, its dtype, its maximal length, and the identity of its weights."""

    folder: Path
    architecture: str  # its name in `architectures` of config.json
    rules: ConfigRules = field(repr=False, compare=False)  # the rules of its architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # width of queries and keys
    latent: LatentShape | None  # None: keys and values are cached, not latents
    linear: LinearAttentionShape | None = None  # None: no layer has linear attention
    mamba: MambaShape | None = None  # None: no layer has Mamba-2
    full_heads: HeadShape | None = None  # KV heads of layers with full attention; None: `num_kv_heads` of `head_dim`
    window_heads: HeadShape | None = None  # KV heads of layers with a window, as `full_heads`
    kv_sources: tuple[int, ...] = ()  # for each layer, the one whose keys and values it reads; (): all read their own
    doubles_shared_mlps: bool = False  # whether layers that read another's keys and values have MLPs of twice the width
    layer_inputs: LayerInputShape | None = None
    rotated_layers: tuple[bool, ...] = ()  # for each layer: whether it rotates queries and keys; (): as `rope` says
    query_growth: QueryGrowth | None = None
    rotary_fraction: float = 1.0  # share of a head's dimensions that are rotated
    norms_heads: bool = False  # the flag `AttentionForm.qk_norm_key`, in families that have one
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: Rope
    window_rope: Rope | None  # the rope of layers with a window; None: `rope`
    moe: ExpertsConfig | None  # None: every feed-forward layer is dense
    num_draft_layers: int  # by config.json
    num_stored_draft_layers: int = 0  # those of them that the checkpoint holds: converted ones often leave them out
    num_run_draft_layers: int = 0  # draft layers that are loaded and run: as layers `num_layers`, `num_layers` + 1, ...
    draft_model: ModelConfig | None = None  # a smaller model or an EAGLE-3 head, which drafts tokens for this model
    eagle3: Eagle3Shape | None = None  # None: this is no EAGLE-3 head
    quantization: Quantization | None  # None: plain weights
    cache_dtype: str  # dtype of cached keys and values: `dtype`, or `FP8_CACHE_DTYPE`
    has_cache_scales: bool  # whether the checkpoint has factors for keys and values that are cached in FP8
    scales: Scales
    layer_windows: tuple[int | None, ...]  # for each layer: how many keys a query sees, its own included; None: all
    window_caches: bool = False  # whether layers with a window cache only the tokens in it
    dtype: str  # "float32", "bfloat16" or "float16"
    max_model_len: int  # tokens, prompt and output together
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    load_format: str
    seed: int  # seed of dummy weights
    identity: str  # hash (32 hex digits) of the weights and of the computation: `config_reader.identity_of`
    is_text_part: bool = False  # this is the text part of a multimodal checkpoint: `text_part.py`

    @cached_property
    def caches(self) -> CacheLayout:
        """The cache groups of all layers (draft layers that are run included), not divided over ranks."""
        layers = range(self.num_run_layers)
        return CacheLayout.of_layers(self.identity, [self.rules.cache(self, layer) for layer in layers])

    @property
    def drafted_from(self) -> tuple[int, ...]:
        """Layers whose inputs an EAGLE-3 head or draft layers read; (): none, or they read the last hidden states.

        Index `num_layers` stands for the input of the last norm.
        """
        head = None if self.draft_model is None else self.draft_model.eagle3
        if head is not None:
            return head.layers
        rules = self.rules.draft
        return (self.num_layers,) if self.num_run_draft_layers and rules is not None and rules.reads_total else ()

    @property
    def num_run_layers(self) -> int:
        """The number of decoder layers, including the draft layers that are run."""
        return self.num_layers + self.num_run_draft_layers

    @property
    def cache_scales(self) -> bool:
        """True if cached keys and values have factors."""
        return self.has_cache_scales and self.cache_dtype == FP8_CACHE_DTYPE

    def with_fp8_cache(self) -> ModelConfig:
        """Return the same config with keys and values cached in 8 bits. Raises `UnsupportedModel` for latents."""
        if self.latent is not None:
            raise UnsupportedModel("kv_cache_dtype must be 'auto': caches of latents are kept in the model's dtype")
        return replace(self, cache_dtype=FP8_CACHE_DTYPE)

    def with_draft_layers(self) -> ModelConfig:
        """Return the same config with the first draft layer loaded and run, too, or all if each drafts one token.

        Raises `UnsupportedModel`.
        """
        rules = self.rules.draft
        if rules is None:
            raise UnsupportedModel(f"config.json: speculation by 'mtp' is not supported for {self.architecture}")
        if not self.num_draft_layers:
            raise UnsupportedModel("config.json: speculation by 'mtp' needs draft layers, and there are none")
        moe, linear, count = self.moe, self.linear, self.num_draft_layers if rules.one_each else 1
        if (stored := self.num_stored_draft_layers) < count:
            raise UnsupportedModel(
                f"{self.folder}: speculation by 'mtp' needs draft layers, and there are no tensors "
                f"{rules.path(self, stored)}.*"
            )
        window = next(filter(None, self.layer_windows), None) if rules.has_window else None
        is_sparse = moe is not None and any(moe.sparse_layers) and not rules.is_dense
        return replace(
            self,
            num_run_draft_layers=count,
            layer_windows=(*self.layer_windows, *[window] * count),
            moe=moe and replace(moe, sparse_layers=(*moe.sparse_layers, *[is_sparse] * count)),
            linear=linear and replace(linear, layers=(*linear.layers, *[False] * count)),
        )

    @cached_property
    def draft_inputs(self) -> Mapping[int, StateLayout]:
        """The layout of one draft token's inputs to the layers of each cache group of states.

        They are kept for draft tokens, so that states can be advanced by the accepted ones afterwards.
        """
        states = {
            n: group.blocks for n, group in enumerate(self.caches.groups) if isinstance(group.blocks, StateLayout)
        }
        return {number: _inputs_of_states(self, layout) for number, layout in states.items()}

    def heads_of(self, layer: int) -> HeadShape:
        """Return the KV heads of a layer."""
        given = self.full_heads if self.layer_windows[layer] is None else self.window_heads
        return given or HeadShape(self.num_kv_heads, self.head_dim, self.head_dim)

    def kv_source(self, layer: int) -> int:
        """Return the index of the layer whose keys and values a layer reads, usually its own."""
        return self.kv_sources[layer] if self.kv_sources else layer

    @property
    def qk_norm(self) -> QKNorm | None:
        """The norm of queries and keys."""
        form = self.rules.attention
        return form.qk_norm if form.qk_norm_key is None or self.norms_heads else None

    def rotation(self, layer: int) -> Rotation:
        """Return the rotation of a layer's queries and keys: by `NO_ROPE` if the layer does not rotate them."""
        own = None if self.layer_windows[layer] is None else self.window_rope
        rope = self.rope if own is None else own
        if self.rotated_layers and not self.rotated_layers[layer]:
            rope = NO_ROPE
        if self.latent is not None:
            return Rotation(rope, self.latent.rope_dim)
        dim = int(self.heads_of(layer).key_dim * self.rotary_fraction)
        return Rotation(rope, min(dim, rope.most_dims) if isinstance(rope, NoRope) else dim)

    @cached_property
    def rotations(self) -> tuple[Rotation, ...]:
        """The distinct rotations of the layers. Each has a table of angles, `LayerContext.cos_sin`."""
        return tuple(dict.fromkeys(self.rotation(layer) for layer in range(self.num_run_layers)))

    def mlp_width(self, layer: int) -> int:
        """Return the width of a layer's dense MLP."""
        doubles = self.doubles_shared_mlps and self.kv_source(layer) != layer
        return self.intermediate_size * (2 if doubles else 1)

    @property
    def head_shapes(self) -> tuple[HeadShape, ...]:
        """The distinct shapes of the layers' KV heads."""
        return tuple(dict.fromkeys(self.heads_of(layer) for layer in range(self.num_run_layers)))

    @property
    def num_mlps(self) -> int:
        """The number of layers with a dense MLP, not counting experts and shared experts."""
        if self.mamba is not None:
            return self.mamba.count(MLP)
        if self.moe is None or self.moe.beside_mlp:
            return self.num_run_layers
        return self.moe.sparse_layers.count(False)

    @property
    def has_states(self) -> bool:
        """True if some layers keep recurrent states."""
        linear, mamba = self.linear, self.mamba
        return (linear is not None and any(linear.layers)) or (mamba is not None and mamba.count(MAMBA) > 0)
