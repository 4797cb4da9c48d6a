"""Sampling parameters. Names and defaults are vLLM's, so that scripts written for one run on the other."""

from __future__ import annotations

import functools
import json
import math
from typing import Any, TypeVar

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
SEED_BITS = 63
MAX_TOP_K = 2**31 - 1  # beyond any vocabulary; larger numbers fit no tensor
MAX_GRAMMAR_CHARS = 2**17  # in a schema, pattern or grammar, or in all choices together

_EMPTY: dict[str, list[Any] | dict[int, float]] = {
    "stop": [],
    "stop_token_ids": [],
    "logit_bias": {},
    "bad_words": [],
    "bad_words_token_ids": [],
}


class InvalidSamplingParams(ValueError):
    """A sampling parameter is out of its range. `field` is the parameter's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


_Params = TypeVar("_Params", bound=msgspec.Struct)


def as_decoded(params: _Params, where: str = "") -> _Params:
    """Return `params` as a decoder would have made them: lists instead of tuples, arrays and tensors, Python's numbers.

    Raises `InvalidSamplingParams` for a value of another type than its field's, which a constructor notices only if its
    checks fail on it.
    """
    return type(params)(**_decoded_values(params, where))


def _decoded_values(params: msgspec.Struct, where: str = "") -> dict[str, Any]:
    values = {}
    for field in _fields(type(params)):
        value, name = getattr(params, field.name), where + field.name
        if value is field.default:
            values[field.name] = value
            continue
        if isinstance(value, msgspec.Struct):
            value = as_decoded(value, f"{name}.")
        try:
            values[field.name] = msgspec.convert(_plain(value), field.type)
        except UnicodeEncodeError:
            raise InvalidSamplingParams(name, "is not valid text: it holds half a surrogate pair") from None
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, InvalidSamplingParams):
                raise error.__cause__ from None
            message, _, path = str(error).partition(" - at `")
            inner = path.removeprefix("$").rstrip("`") if path.startswith("$") else ""
            raise InvalidSamplingParams(name + inner, message) from None
    return values


_fields = functools.cache(msgspec.structs.fields)  # cached, because it evaluates annotations each time


def _plain(value: Any) -> Any:
    """Return the value in Python's own types. Raises `UnicodeEncodeError` for half a surrogate pair."""
    if isinstance(value, str):
        value.encode()
    if hasattr(value, "tolist"):  # numpy arrays and torch tensors
        return value.tolist()
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the output: one of the first six fields, exactly. Names are vLLM's; a `json` schema becomes text.

    Raises `InvalidSamplingParams`. Only the engine's compiler finds out whether a grammar is valid.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # EBNF in llama.cpp's notation; the rule `root` is the output
    json_object: bool | None = None
    structural_tag: str | None = None  # JSON in xgrammar's format: structures within free text
    disable_any_whitespace: bool = False  # JSON with one space after `:` and `,`, and none elsewhere between its parts
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        try:
            self._check()
        except (TypeError, AttributeError):
            _decoded_values(self, "structured_outputs.")
            raise

    def _check(self) -> None:
        if isinstance(self.json, dict):
            msgspec.structs.force_setattr(self, "json", json.dumps(self.json, ensure_ascii=False))
        if self.json_object is False:
            msgspec.structs.force_setattr(self, "json_object", None)
        given = [name for name in _KINDS if getattr(self, name) is not None]
        kinds = ", ".join(_KINDS)
        self._require("", len(given) == 1, f"must have exactly one of {kinds}; given: {', '.join(given) or 'none'}")
        self._require("whitespace_pattern", self.whitespace_pattern is None, "is not supported; leave it out")
        reason = "is not supported; say additionalProperties: false in the schema"
        self._require("disable_additional_properties", not self.disable_additional_properties, reason)
        self._require("choice", self.choice is None or all(self.choice), "must not hold an empty string")
        self._require("choice", self.choice != [], "must name at least one choice")
        text = "".join(self.choice) if self.choice is not None else str(getattr(self, given[0]))
        self._require(given[0], text != "", "must not be empty")
        reason = f"has {len(text)} characters, more than the {MAX_GRAMMAR_CHARS} that are allowed"
        self._require(given[0], len(text) <= MAX_GRAMMAR_CHARS, reason)

    @property
    def kind(self) -> str:
        """The name of the field, of those six, that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @staticmethod
    def _require(field: str, condition: bool, message: str) -> None:
        if not condition:
            raise InvalidSamplingParams(f"structured_outputs.{field}".rstrip("."), message)


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of how tokens are drawn, and of when a generation ends.

    The engine itself acts on token ids only. `n`, `stop`, `bad_words`, `detokenize`, `skip_special_tokens` and
    `include_stop_str_in_output` are implemented where the tokenizer is (the gateway, or `LLM`); `bad_words`
    reach the engine as `bad_words_token_ids`.

    Lists and maps may be given as None, and `stop` and `bad_words` as a single string, as in vLLM.

    The constructor raises `InvalidSamplingParams` for values that no engine could serve.
    """

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 0 keeps the most likely token; tokens of equal probability are kept or dropped together
    top_k: int = 0  # 0 and -1: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in the CTRL paper (arXiv:1909.05858)
    presence_penalty: float = 0.0  # over output only, as OpenAI defines it
    frequency_penalty: float = 0.0
    seed: int | None = None  # -1 means none, as in vLLM; to other negative seeds 2**SEED_BITS is added
    max_tokens: int | None = 16  # None: up to the model's length
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = []
    stop_token_ids: list[int] = []
    logprobs: int | None = None  # number of alternatives beside the sampled token; 0: only the sampled token's
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    bad_words_token_ids: list[list[int]] = []
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        try:
            self._check()
        except (TypeError, AttributeError):  # a check failed on a value of a wrong type: the next line names its field
            _decoded_values(self)
            raise

    def _check(self) -> None:
        self._unify_forms()
        self._check_numbers()
        self._check_ends()
        self._check_tokens()
        if self.structured_outputs is not None:  # nothing may follow a complete answer
            self._require("min_tokens", not self.min_tokens, "does not go with structured_outputs")
            self._require("ignore_eos", not self.ignore_eos, "does not go with structured_outputs")

    def _check_numbers(self) -> None:
        self._require("n", 1 <= self.n <= 128, "must be from 1 to 128")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            self._require(name, math.isfinite(getattr(self, name)), "must be a finite number")
        self._require("temperature", 0.0 <= self.temperature <= 100.0, "must be from 0 to 100")
        self._require("top_p", 0.0 <= self.top_p <= 1.0, "must be from 0 to 1")
        self._require("top_k", -1 <= self.top_k <= MAX_TOP_K, f"must be -1 or 0 (all) or a count up to {MAX_TOP_K}")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "must be from 0 to 1")
        self._require("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "must be above 0 and at most 100")
        self._require("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be from -2 to 2")
        self._require("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be from -2 to 2")
        seeds = f"must be from -2**{SEED_BITS} to 2**{SEED_BITS} - 1"
        self._require("seed", self.seed is None or 0 <= self.seed < 2**SEED_BITS, seeds)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            self._require(name, count is None or 0 <= count <= MAX_LOGPROBS, f"must be from 0 to {MAX_LOGPROBS}")

    def _check_ends(self) -> None:
        self._require("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1")
        self._require("min_tokens", self.min_tokens >= 0, "must be at least 0")
        self._require(
            "min_tokens", self.max_tokens is None or self.min_tokens <= self.max_tokens, "must not exceed 'max_tokens'"
        )
        self._require("stop", len(self.stop) <= MAX_STOP_STRINGS, f"must hold at most {MAX_STOP_STRINGS} strings")
        self._require("stop", all(self.stop), "must not hold an empty string")

    def _check_tokens(self) -> None:
        for token, bias in self.logit_bias.items():
            self._require("logit_bias", token >= 0, f"must not have the negative token id {token}")
            self._require(
                "logit_bias",
                -100.0 <= bias <= 100.0,
                f"must have a bias from -100 to 100, not {bias:g} for token {token}",
            )
        self._require("allowed_token_ids", self.allowed_token_ids != [], "must name at least one token")
        self._require("bad_words_token_ids", all(self.bad_words_token_ids), "must not hold an empty sequence")

    def _unify_forms(self) -> None:
        for name, empty in _EMPTY.items():
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, empty.copy())
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            if isinstance(value, str):  # or else each character would count as an entry
                msgspec.structs.force_setattr(self, name, [value])
        if self.seed is not None and -(2**SEED_BITS) <= self.seed < 0:
            msgspec.structs.force_setattr(self, "seed", None if self.seed == -1 else self.seed % 2**SEED_BITS)

    @staticmethod
    def _require(field: str, condition: bool, message: str) -> None:
        if not condition:
            raise InvalidSamplingParams(field, message)

    @property
    def is_plain(self) -> bool:
        """True if draws depend only on logits, temperature, top-k, top-p, min-p, a grammar, and `min_tokens`."""
        changes = (self.logit_bias, self.allowed_token_ids, self.bad_words_token_ids)
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return not any(changes) and penalties == (1.0, 0.0, 0.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidSamplingParams` for token ids outside the vocabulary, or more logprobs than it has tokens."""
        for field in ("logprobs", "prompt_logprobs"):
            self._require(field, (getattr(self, field) or 0) <= vocab_size, f"the vocabulary has {vocab_size} tokens")
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": list(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or [],
            "bad_words_token_ids": [token for word in self.bad_words_token_ids for token in word],
        }
        for field, tokens in named.items():
            for token in (min(tokens), max(tokens)) if tokens else ():
                self._require(
                    field, 0 <= token < vocab_size, f"token id {token} is not in the vocabulary of {vocab_size}"
                )
