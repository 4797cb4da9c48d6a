"""A prepared request, and the generation job that is made from it.

    body ──Preparer──> PreparedRequest ──with a name and a seed──> GenerationJob: one sequence for each choice

`PreparedRequest` is plain data, since a body process may make it instead of this process.
"""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.engine.core.block_log import unpack_names
from baton.engine.core.messages import EngineRequest
from baton.engine.core.sampling import SEED_BITS, SamplingParams
from baton.engine.text import ParserConfig, ReasoningStart, Tokenizer, ToolCallFormat


class UsageOptions(msgspec.Struct, frozen=True):
    """Options of token usage in a stream."""

    at_end: bool = False
    in_each_chunk: bool = False


class ResponseEcho(msgspec.Struct, frozen=True):
    """Fields of a request to `/v1/responses` that its response repeats."""

    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    user: str | None


class ParserOptions(msgspec.Struct, frozen=True):
    """The serializable part of a `ParserConfig`: all except the model's tool-call format, which each process has."""

    has_form: bool = False
    functions: dict[str, Any] = {}
    at_most_one: bool = False
    reasoning: ReasoningStart = ReasoningStart.NONE

    @classmethod
    def of(cls, config: ParserConfig) -> ParserOptions:
        functions = dict(config.functions)
        return cls(config.form is not None, functions, config.at_most_one, config.reasoning)

    def config(self, form: ToolCallFormat | None) -> ParserConfig:
        return ParserConfig(form if self.has_form else None, self.functions, self.at_most_one, self.reasoning)


class PreparedRequest(msgspec.Struct, kw_only=True):
    """A request that is validated and tokenized."""

    prompts: list[list[int]]
    block_names: list[bytes]  # of each prompt: packed names of its full blocks, as engines report cached blocks
    limits: list[int]  # most tokens that may follow each prompt
    sampling: SamplingParams  # as sent by the client, with `n`, `stop` and `seed`
    priority: int
    cache_salt: str
    streams: bool
    usage: UsageOptions
    is_resumable: bool
    tells_timeline: bool
    prediction: list[int] | None = None  # tokens of the answer that the client expects, if it gave one
    echoes: list[str] | None = None  # with `echo`: each prompt's text
    shows_prompt_logprobs: bool = False  # in the field `prompt_logprobs`; `echo` may need them as well
    scores_only: bool = False  # `max_tokens: 0` with `echo`: only log probabilities of the prompt are wanted
    returns_token_ids: bool = False
    omits_thoughts: bool = False  # `/v1/messages` only: thoughts are sent in a signature, not as text
    parser_options: ParserOptions = ParserOptions()
    response_echo: ResponseEcho | None = None  # of `/v1/responses`
    client_field_names: dict[str, str] = {}  # field name in the engine -> field name of the client

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all prompts together."""
        return sum(map(len, self.prompts))

    @property
    def num_held_tokens(self) -> int:
        """The number of tokens that are held in memory until the request ends."""
        return self.num_tokens + len(self.prediction or ())


@dataclass(frozen=True)
class GenerationJob:
    """The sequences of one HTTP request: `n` for each prompt, in the order of the choices."""

    request_id: str
    created: int  # Unix time
    prepared: PreparedRequest
    sequences: list[EngineRequest]
    block_names: list[tuple[int, ...]]  # of each prompt
    parser_config: ParserConfig  # how answers are parsed
    shown_token_ids: frozenset[int]  # special tokens whose text the parsers need

    @classmethod
    def of(
        cls, prepared: PreparedRequest, request_id: str, tokenizer: Tokenizer, created: int | None = None
    ) -> GenerationJob:
        """Return the job. `created`: None for now; for a resumed stream, when it began."""
        now = time.time()
        config = prepared.parser_options.config(tokenizer.tool_call_format)
        return cls(
            request_id=request_id,
            created=int(now) if created is None else created,
            prepared=prepared,
            sequences=_sequences(prepared, request_id, now),
            block_names=[unpack_names(packed) for packed in prepared.block_names],
            parser_config=config,
            shown_token_ids=tokenizer.special_ids_of(config.marks),
        )


def _sequences(prepared: PreparedRequest, request_id: str, now_s: float) -> list[EngineRequest]:
    sampling = prepared.sampling
    seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed
    unique = f"{request_id}-{random.getrandbits(48):012x}"  # clients may reuse request ids
    wire = msgspec.structs.replace(sampling, n=1, stop=[], bad_words=[], seed=None)  # without the gateway's own part
    sequences: list[EngineRequest] = []
    for tokens, limit in zip(prepared.prompts, prepared.limits, strict=True):
        for choice in range(sampling.n):
            sequences.append(
                EngineRequest(
                    request_id=f"{unique}-{len(sequences)}",
                    prompt_token_ids=tokens,
                    sampling=msgspec.structs.replace(wire, max_tokens=limit),
                    seed=(seed + choice) % 2**SEED_BITS,
                    priority=prepared.priority,
                    arrival_s=now_s,
                    cache_salt=prepared.cache_salt,
                    prediction_token_ids=prepared.prediction or [],
                )
            )
    return sequences
