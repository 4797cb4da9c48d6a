"""Settings of speculation, under vLLM's names: the fields of `speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from baton.engine.strict_model import StrictModel, nearest

from .drafter import DeviceDrafter, Drafter
from .ngram import NgramDrafter
from .suffix import SuffixDrafter

MAX_DRAFTS = 15  # of one request in a step
MAX_DRAFTED_TOKENS = 512  # in a step with drafts, of all kinds: every draw needs memory for its logits
METHODS = ("ngram", "suffix", "mtp", "draft_model", "eagle3")
_LOADED = ("draft_model", "eagle3")  # these have a checkpoint of their own
_LOOKUP_TOKENS = 5  # vLLM's default
_REFUSED_METHODS = {
    "mlp_speculator": "needs a trained head, and none is loaded",
    "medusa": "needs trained heads, and none are loaded",
    "eagle": "is EAGLE before its third version, whose heads are not loaded",
    "ngram_gpu": "is 'ngram' searched for on a GPU: the search takes microseconds on a CPU",
    "extract_hidden_states": "guesses nothing",
    "custom_class": "runs code of callers within a step",
}
_OF_METHOD = {
    "prompt_lookup_max": "ngram",
    "prompt_lookup_min": "ngram",
    "suffix_decoding_max_tree_depth": "suffix",
    "suffix_decoding_max_cached_requests": "suffix",
    "suffix_decoding_max_spec_factor": "suffix",
    "suffix_decoding_min_token_prob": "suffix",
}


class SpeculativeConfig(StrictModel):
    """The method that guesses tokens, and its limits. Keys of other methods are refused."""

    model_config = ConfigDict(strict=True)

    refused: ClassVar[Mapping[str, str]] = {
        "quantization": "a draft model's follows from its checkpoint",
        "max_model_len": "a draft model serves sequences as long as the model's",
        "code_revision": "no code of checkpoints is run",
        "draft_tensor_parallel_size": "a draft model is divided as the model is",
        "draft_load_config": "a draft model is loaded as the model is",
        "parallel_drafting": "guesses are made one after the other",
        "use_local_argmax_reduction": "guesses are drawn as tokens are",
        "disable_padded_drafter_batch": "steps follow the engine's own enforce_eager",
        "enforce_eager": "steps follow the engine's own enforce_eager",
        "speculative_token_tree": "drafts are one sequence: no tree of them is checked",
        "rejection_sample_method": "a draft is accepted where the undisturbed draw gives the same token",
        "disable_by_batch_size": "the number of drafts follows the load by itself",
    }

    method: str
    model: str | None = None  # draft_model, eagle3: a folder with config.json and safetensors, or a name on the Hub
    revision: str | None = None  # of a name: a branch, a tag or a commit; by default `main`
    # The most drafts of one request in a step. It gets fewer if few are accepted, or if the batch is large.
    num_speculative_tokens: int = Field(MAX_DRAFTS, ge=1, le=MAX_DRAFTS)
    # ngram: how many of the last tokens must have occurred before. If only one of the two is given, both get its value.
    prompt_lookup_max: int = Field(_LOOKUP_TOKENS, ge=1, le=64)
    prompt_lookup_min: int = Field(_LOOKUP_TOKENS, ge=1, le=64)
    suffix_decoding_max_tree_depth: int = Field(24, ge=2, le=64)  # most tokens of a match
    suffix_decoding_max_cached_requests: int = Field(10_000, ge=0, le=10**6)  # recent answers to guess from
    suffix_decoding_max_spec_factor: float = Field(1.0, ge=0, le=1000)  # guesses for each token of the match
    # The share of the places with the same match that must agree on a guess.
    suffix_decoding_min_token_prob: float = Field(0.1, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        if str(given.get("method")).endswith("_mtp"):  # vLLM has a name for each model family
            given["method"] = "mtp"
        if "method" not in given and "model" in given:
            given["method"] = "draft_model"
        if given.get("method") == "mtp":
            given.setdefault("num_speculative_tokens", 1)  # vLLM's default: draft layers are trained to guess one token
        low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        if (low is None) != (high is None):
            given["prompt_lookup_min"] = given["prompt_lookup_max"] = high if low is None else low
        return given

    @field_validator("method")
    @classmethod
    def _is_known(cls, method: str) -> str:
        if method not in METHODS:
            names = ", ".join(f"'{name}'" for name in METHODS)
            if (reason := _REFUSED_METHODS.get(method)) is not None:
                raise ValueError(f"is {method!r}, which {reason}; methods that work are {names}")
            near = nearest(method, [*METHODS, *_REFUSED_METHODS])
            raise ValueError(f"is {method!r}, must be one of {names}{near and f'; {near}'}")
        return method

    @property
    def guesses_on_device(self) -> bool:
        """True if a draft layer, head or model guesses on the device, at the end of each step."""
        return self.method in ("mtp", *_LOADED)

    @model_validator(mode="after")
    def _keys_fit_the_method(self) -> Self:
        problems = {
            name: f"is for {method!r}, and the method is {self.method!r}: leave it out"
            for name, method in _OF_METHOD.items()
            if method != self.method and getattr(self, name) != type(self).model_fields[name].default
        }
        if not problems and self.prompt_lookup_min > self.prompt_lookup_max:
            problems["prompt_lookup_min"] = (
                f"is {self.prompt_lookup_min}, must be at most prompt_lookup_max ({self.prompt_lookup_max})"
            )
        if self.method in ("ngram", *_LOADED) and "num_speculative_tokens" not in self.model_fields_set:
            problems["num_speculative_tokens"] = (
                f"is required with {self.method!r}: the maximum number of draft tokens, 1 to {MAX_DRAFTS}"
            )
        if self.method in _LOADED and self.model is None:
            problems["model"] = f"is required with {self.method!r}: a folder or a name of the Hub"
        for name in ("model", "revision"):
            if self.method not in _LOADED and getattr(self, name) is not None:
                problems[name] = f"is for {' and '.join(map(repr, _LOADED))}, and the method is {self.method!r}"
        self.refuse(problems)
        return self


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """Return the drafter of the config's method."""
    if config.guesses_on_device:
        return DeviceDrafter()
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    return SuffixDrafter(
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )
