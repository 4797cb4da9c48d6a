"""Refusals of invalid requests: each has its status and names the field, and the server still answers afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster.contracts import Role

from ...helpers.gateway_service import Service, check_refused
from .refusals import BOTH, CHAT, HUGE, check_alive

pytestmark = pytest.mark.exhaustive


@pytest.fixture
async def service(start: Callable[..., Service]) -> Service:
    return start(Role.UNIFIED, max_body_bytes=200_000, max_choices=8)


SAMPLING: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-0.1, 101, "1", True, [], {})],
    *[("top_p", value) for value in (-0.1, 1.1, -1, "0.5", False)],
    *[("top_k", value) for value in (-2, 1.5, "3", True)],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("repetition_penalty", value) for value in (0, -1, 101)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, "0")],
    *[("frequency_penalty", value) for value in (-2.1, 2.1)],
    *[("n", value) for value in (0, -1, 129, HUGE, 1.5, 0.0, 1e30, "1", True)],
    *[("seed", value) for value in (-(2**63) - 1, 2**63, HUGE, 1.5, "1")],
    *[("min_tokens", value) for value in (-1, 17, HUGE)],
    *[("stop", value) for value in (3, "", ["a", ""], [1], ["x"] * 65, {})],
    *[("stop_token_ids", value) for value in ([-1], [HUGE], "5", [True], [1.0])],
    *[("logit_bias", value) for value in ([], {"a": 1}, {"-1": 1}, {"1": 101}, {"9999999": 1}, {"1.0": 1})],
    ("logit_bias", {str(token): 0 for token in range(4097)}),
    *[("allowed_token_ids", value) for value in ([], [-1], [HUGE])],
    *[("bad_words", value) for value in ("fox", [1], ["x"] * 257, ["x" * 257])],
    ("stop", "x" * 1025),
    ("stop_token_ids", [5] * 1025),
    *[("prompt_logprobs", value) for value in (-1, 21, True)],
    *[("ignore_eos", value) for value in (1, "true")],
    *[("skip_special_tokens", value) for value in (0, "no")],
    *[("include_stop_str_in_output", value) for value in (0, "no")],
    *[("stream", value) for value in (1, "true", "yes")],
    *[("stream_options", value) for value in (True, [], {"include_usage": True})],
    *[("priority", value) for value in (1.5, HUGE, "high")],
    *[("cache_salt", value) for value in ("", 3, "x" * 257)],
    *[("user", value) for value in (3, [])],
    *[("store", value) for value in (True, "no")],
    *[("service_tier", value) for value in ("priority", 3)],
]


@pytest.mark.slow
@pytest.mark.parametrize(("field", "value"), SAMPLING)
async def test_sampling_values_out_of_range_or_of_a_wrong_type_are_named(
    service: Service, field: str, value: Any
) -> None:
    """`min_tokens: 17` exceeds the default `max_tokens` of completions, 16."""
    response = await service.complete("hello", **{field: value})
    message = check_refused(response, 400, response.json()["error"]["param"])
    param = response.json()["error"]["param"]
    assert param.split(".")[0].split("[")[0] == field
    assert field in message
    await check_alive(service)


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
async def test_literals_of_no_finite_number_are_refused(service: Service, path: str, body: Any, literal: str) -> None:
    text = json.dumps({"model": "tiny", **body})[:-1] + f', "temperature": {literal}}}'
    response = await service.http.post(path, content=text)
    assert response.status_code == 400
    check_refused(response, 400, "temperature" if "999" in literal else None)


PROMPTS: list[tuple[Any, str | None]] = [
    ("", None),
    ([], None),
    ([[]], None),
    ([""], None),
    ([[5], []], None),
    (["hello", [5]], None),
    ([5, "hello"], None),
    ([5.0], None),
    ([True], None),
    ([None], None),
    (None, None),
    (3, None),
    ({}, None),
    ([-1], None),
    ([320], None),
    ([[5], [HUGE]], None),
    ([5] * 256, "context_length_exceeded"),
    ([5] * 20_000, "context_length_exceeded"),
    ("fox " * 5_000, "context_length_exceeded"),
    (["hello"] * 9, None),
]


@pytest.mark.parametrize(("prompt", "code"), PROMPTS, ids=lambda value: repr(value)[:40])
async def test_prompts_that_cannot_be_served_are_refused(service: Service, prompt: Any, code: str | None) -> None:
    check_refused(await service.complete(prompt), 400, "prompt", code)
    await check_alive(service)


async def test_the_refusal_of_a_long_prompt_states_the_numbers(service: Service) -> None:
    message = check_refused(await service.complete([5] * 300), 400, "prompt", "context_length_exceeded")
    assert "256" in message
    assert "300" in message
    message = check_refused(await service.chat("fox " * 500), 400, "messages", "context_length_exceeded")
    assert "256" in message


@pytest.mark.parametrize("value", [-1, 0, HUGE, 257, 256, 1.5, "5", True, []])
async def test_max_tokens_must_leave_room_for_the_prompt(service: Service, value: Any) -> None:
    check_refused(await service.complete("hello", max_tokens=value), 400, "max_tokens")
    for name in ("max_tokens", "max_completion_tokens"):
        check_refused(await service.chat("hello", **{name: value}), 400, name)


async def test_the_refusal_of_too_many_tokens_states_the_numbers(service: Service) -> None:
    response = await service.complete([5] * 100, max_tokens=157)
    message = check_refused(response, 400, "max_tokens", "context_length_exceeded")
    assert all(number in message for number in ("256", "100", "157", "257"))
    assert (await service.complete([5] * 100, max_tokens=156)).status_code == 200


NOT_SUPPORTED = {
    "suffix": "end",
    "best_of": 2,
    "functions": [{}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "web_search_options": {},
    "reasoning_effort": "high",
    "verbosity": "low",
    "guided_decoding_backend": "outlines",
    "use_beam_search": True,
    "length_penalty": 2.0,
    "truncation_side": "right",
    "chat_template": "{{ messages }}",
    "documents": [{}],
    "mm_processor_kwargs": {},
    "prompt_cache_options": {},
    "return_token_offsets": True,
    "spaces_between_special_tokens": False,
    "thinking_token_budget": 5,
}


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("field", NOT_SUPPORTED)
async def test_unsupported_fields_are_refused_by_name(service: Service, path: str, body: Any, field: str) -> None:
    response = await service.http.post(path, json={"model": "tiny", **body, field: NOT_SUPPORTED[field]})
    message = check_refused(response, 400, field, "unsupported_parameter")
    assert "not supported" in message


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_unsupported_fields_are_accepted_with_values_that_have_no_effect(
    service: Service, path: str, body: Any
) -> None:
    nothing = {"return_token_ids": False, "spaces_between_special_tokens": True, "stream_interval": 1, "echo": False}
    nothing |= {"include_reasoning": True, "prompt_cache_options": None, "suffix": None, "use_beam_search": False}
    assert (
        await service.http.post(path, json={"model": "tiny", "max_tokens": 1, **body, **nothing})
    ).status_code == 200


@pytest.mark.parametrize(("field", "value"), [("tools", [{"type": "function"}]), ("tool_choice", "required")])
async def test_only_chats_have_tools(service: Service, field: str, value: Any) -> None:
    check_refused(await service.complete("hello", **{field: value}), 400, field, "unsupported_parameter")


@pytest.mark.parametrize(("path", "body"), BOTH)
async def test_unknown_fields_are_refused_with_the_nearest_name(service: Service, path: str, body: Any) -> None:
    response = await service.http.post(path, json={"model": "tiny", **body, "temprature": 1})
    message = check_refused(response, 400, "temprature", "unknown_parameter")
    assert "'temperature'" in message
    for field, value, param in (
        ("stream_options", {"usage": True}, "stream_options.usage"),
        ("xyzzy", 1, "xyzzy"),
    ):
        response = await service.http.post(path, json={"model": "tiny", **body, field: value})
        assert check_refused(response, 400, param, "unknown_parameter").endswith(" Leave it out.")


@pytest.mark.parametrize(
    ("path", "field", "advice"),
    [
        ("/v1/completions", "max_completion_tokens", "Did you mean 'max_tokens'?"),
        ("/v1/completions", "enable_thinking", "Leave it out."),
        ("/v1/completions", "extra_body", "Put its fields into the body itself."),
        ("/v1/completions", "request_id", "Send it as the header 'x-request-id'."),
        (CHAT, "enable_thinking", "Put it into 'chat_template_kwargs'."),
        (CHAT, "thinking", "Put it into 'chat_template_kwargs'."),
    ],
)
async def test_unknown_fields_that_clients_often_send_are_refused_with_advice(
    service: Service, path: str, field: str, advice: str
) -> None:
    response = await service.http.post(path, json={"model": "tiny", **dict(BOTH)[path], field: True})
    assert check_refused(response, 400, field, "unknown_parameter").endswith(f" {advice}")


async def test_a_refusal_names_other_fields_as_the_client_does(service: Service) -> None:
    """`min_tokens` is compared with the field that sets the limit, whose name differs between the routes."""
    asked = {"model": "tiny", "min_tokens": 3}
    for path, limit, body in (
        ("/v1/completions", "max_tokens", {"prompt": "hello"}),
        (CHAT, "max_completion_tokens", dict(BOTH)[CHAT]),
        ("/v1/responses", "max_output_tokens", {"input": "hello"}),
    ):
        response = await service.http.post(path, json={**asked, **body, limit: 2})
        assert check_refused(response, 400, "min_tokens") == f"'min_tokens' must not exceed '{limit}'."


async def test_no_alternatives_may_be_asked_for_without_log_probabilities(service: Service) -> None:
    for fields in ({"top_logprobs": 0}, {"top_logprobs": 0, "logprobs": False}):
        answer = (await service.chat("hello", max_tokens=1, **fields)).json()
        assert answer["choices"][0]["logprobs"] is None


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    (None, "messages"),
    ([3], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 3}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood"),
    ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
    ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]}], ARGUMENTS),
    ([{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}]}], ARGUMENTS),
    ([{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[" * 10000}}]}], ARGUMENTS),
]
FEW_VALUES = [
    ({"store": True}, "'store' must be false."),
    ({"service_tier": "flex"}, "'service_tier' must be 'auto' or 'default', not 'flex'."),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'. This server reads text only."),
    ({"logit_bias": {"5": 1000}}, "'logit_bias' must have a bias from -100 to 100, not 1000 for token 5."),
    (
        {"logit_bias": {"05": 1, "7": 0, "5": 2}},
        "'logit_bias' must have each token once; '05' and '5' are both token 5.",
    ),
    ({"messages": [{"role": "assistant", "refusal": "no"}]}, "must be null, not 'no'."),
    ({"response_format": {"type": "xml" * 100}}, "not '" + ("xml" * 100)[:100] + "...'."),
]


@pytest.mark.parametrize(("fields", "said"), FEW_VALUES)
async def test_refusals_of_enumerated_values_list_them_as_json(service: Service, fields: Any, said: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **fields}
    assert (await service.http.post(CHAT, json=body)).json()["error"]["message"].endswith(said)


async def test_streams_are_not_padded_by_default(service: Service) -> None:
    options = {"stream": True, "max_tokens": 1, "stream_options": {"include_obfuscation": False}}
    assert (await service.complete("hello", **options)).status_code == 200
    options["stream_options"] = {"include_obfuscation": True}
    check_refused(await service.complete("hello", **options), 400, "stream_options.include_obfuscation")


@pytest.mark.parametrize(("messages", "param"), MESSAGES)
async def test_messages_that_make_no_prompt_are_refused(service: Service, messages: Any, param: str) -> None:
    response = await service.http.post(CHAT, json={"model": "tiny", "messages": messages})
    check_refused(response, 400, param)


CHAT_FIELDS = [
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    ({"echo": True}, "echo"),
    ({"prompt": "x"}, "prompt"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_FIELDS)
async def test_chat_fields_that_contradict_each_other_are_refused(service: Service, fields: Any, param: str) -> None:
    check_refused(await service.chat("hello", **fields), 400, param)


BIG_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":[%s1]}' % ("[]," * 20_000)}}
TOO_MANY: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"metadata": {f"k{number}": "" for number in range(17)}}, "metadata", None),
    ({"metadata": {"k" * 65: ""}}, "metadata", None),
    ({"metadata": {"k": "v" * 513}}, "metadata", None),
    ({"chat_template_kwargs": {"k": "v" * 2**17}}, "chat_template_kwargs", None),
    ({"chat_template_kwargs": {"k": [1] * 2**16}}, "chat_template_kwargs", None),
    ({f"k{number}": 1 for number in range(300)}, None, "too_many_values"),
    ({"chat_template_kwargs": {f"k{number}": 1 for number in range(8193)}}, None, "too_many_values"),
    ({"k" * 4097: 1}, None, "too_many_values"),
    ({"u": [[]] * 33_000}, None, "too_many_values"),
    ({"messages": [{"role": "assistant", "tool_calls": [BIG_CALL]}]}, ARGUMENTS, "too_many_values"),
]


@pytest.mark.parametrize(("fields", "param", "code"), TOO_MANY, ids=lambda value: str(value)[:30])
async def test_lists_and_objects_have_limits(
    service: Service, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}
    check_refused(await service.http.post(CHAT, json=body), 400, param, code)
    await check_alive(service)


@pytest.mark.slow
async def test_metadata_and_variables_of_the_largest_allowed_size_are_accepted(service: Service) -> None:
    metadata = {f"{number:064d}": "v" * 512 for number in range(16)}
    variables = {"hint": "hello", "unused": "v" * 60_000}
    assert (await service.chat("hello", max_tokens=1, metadata=metadata)).status_code == 200
    assert (await service.chat("hello", max_tokens=1, chat_template_kwargs=variables)).status_code == 200


COMPLETION_FIELDS = [
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
    ({"n": 9}, "n"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETION_FIELDS)
async def test_completion_fields_out_of_place_are_refused(service: Service, fields: Any, param: str) -> None:
    check_refused(await service.complete("hello", **fields), 400, param)


async def test_a_chat_has_no_more_choices_than_the_operator_allows(service: Service) -> None:
    assert len((await service.chat("hello", max_tokens=1, n=8)).json()["choices"]) == 8
    assert "limit of 8" in check_refused(await service.chat("hello", max_tokens=1, n=9), 400, "n")
