"""Refusals of messages that an engine can never serve, with their reasons."""

from __future__ import annotations

from ..config import EngineCoreConfig
from ..grammar import ASKED_BY
from ..messages import EngineError, EngineRequest, ErrorKind
from ..sampling import SEED_BITS, InvalidSamplingParams


def refusal(
    request: EngineRequest, config: EngineCoreConfig, *, can_transfer: bool, can_constrain: bool = False
) -> EngineError | None:
    """Return the reason why this engine can never serve the request; None if it can."""
    message = _invalid(request, config, can_transfer)
    if message is not None:
        return EngineError(ErrorKind.INVALID, message)
    try:
        request.sampling.check_vocabulary(config.vocab_size)
    except InvalidSamplingParams as error:
        return EngineError(ErrorKind.INVALID, error.message, error.field)
    message = _unconstrainable(request, config, can_constrain)
    if message is not None:
        return EngineError(ErrorKind.INVALID, message, ASKED_BY)
    message = _too_long(request, config)
    if message is not None:
        return EngineError(ErrorKind.TOO_LONG, message)
    return None


def _invalid(request: EngineRequest, config: EngineCoreConfig, can_transfer: bool) -> str | None:
    if not request.prompt_token_ids:
        return "the prompt is empty: give at least one token"
    given = {
        "prompt": request.prompt_token_ids,
        "output": request.output_token_ids,
        "prediction": request.prediction_token_ids,
    }
    for name, token_ids in given.items():
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= config.vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < config.vocab_size)
            return f"token id {wrong} in the {name} is not in the vocabulary of {config.vocab_size}"
    if len(request.prediction_token_ids) > config.max_model_len:
        num_tokens, most = len(request.prediction_token_ids), config.max_model_len
        return f"the prediction has {num_tokens} tokens, it may have {most}: no answer of this model is longer"
    if not 0 <= request.seed < 2**SEED_BITS:
        return f"seed is {request.seed}, it must be from 0 to 2**{SEED_BITS} - 1"
    if (request.keep_kv or request.kv_source is not None) and not can_transfer:
        return "this engine has no KV connector: it can neither offer nor receive KV blocks"
    if request.kv_source is not None:
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) + request.awaits_first_token
        if not 0 < request.kv_source.num_tokens < num_tokens:
            return (
                f"kv_source.num_tokens is {request.kv_source.num_tokens}, it must be from 1 to {num_tokens - 1}: "
                f"at least one of the {num_tokens} tokens must be left to compute"
            )
    if request.awaits_first_token and (request.kv_source is None or request.sampling.structured_outputs is not None):
        return (
            "awaits_first_token: only a request with a kv_source and without structured outputs can wait for its token"
        )
    return None


def _unconstrainable(request: EngineRequest, config: EngineCoreConfig, can_constrain: bool) -> str | None:
    if request.sampling.structured_outputs is None:
        return None
    if not can_constrain:
        return "cannot be kept: this engine has no tokenizer, so it knows tokens but no text"
    if not config.eos_token_ids:
        return "cannot be kept: this model has no end-of-sequence token, so no output could end"
    return None


def _too_long(request: EngineRequest, config: EngineCoreConfig) -> str | None:
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    if num_prompt < config.max_length and num_prompt + num_output <= config.max_length:
        return None
    limit = f"max_model_len is {config.max_model_len}"
    if config.max_length < config.max_model_len:
        limit = f"the {config.num_blocks} KV blocks of this engine hold {config.max_length} tokens"
    given = f"a prompt of {num_prompt} tokens" + (f" and an output of {num_output}" if num_output else "")
    return f"{given} is too long: {limit}, and at least one token of it is for the answer"
