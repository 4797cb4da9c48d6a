"""Tool calls, reasoning and schemas with models of each family, whose markers are special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer as Backend

from baton.cluster.contracts import Role
from baton.cluster.gateway.model import ServedModel
from baton.engine import StructuredOutputsParams
from baton.engine.structured import GrammarVocabulary, XGrammarBackend
from baton.engine.text import Chat, ChatTemplate, Tokenizer
from baton.engine.text.parsers import FORMATS

from ...helpers.family_answers import WRITERS, Call
from ...helpers.family_templates import FAMILIES
from ...helpers.gateway_service import Service, events

pytestmark = pytest.mark.exhaustive

SIZE = {"type": "object", "properties": {"size": {"enum": [1, 2, 3]}}, "required": ["size"]}
COLOR = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}}, "required": ["color"]}
AS_COLOR = {"type": "json_schema", "json_schema": {"name": "color", "schema": COLOR}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SIZE}} for name in ("look", "cut-2")]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
HELLO = [{"role": "user", "content": "hello"}]
BEGUN = {  # the beginning of a call of `look`
    "mistral-list": "[TOOL_CALLS] [",
    "mistral-named": "[TOOL_CALLS]look[ARGS]",
    "deepseek3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look",
    "deepseek3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>",
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look",
    "qwen3-coder": "<tool_call>\n<function=look>\n",
    "glm4.5": "<tool_call>look\n",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="look">\n',
    "deepseek3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n',
}
FINAL = {"harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"}


@pytest.fixture(scope="session")
def marked(tokenizer: Tokenizer) -> Backend:
    """Return a tokenizer with the markers of all families as special tokens."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens([mark for form in FORMATS for mark in form.marks])
    return backend


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def served(family: str, model: ServedModel, marked: Backend) -> ServedModel:
    template = ChatTemplate({"default": FAMILIES[family]})
    tokenizer = Tokenizer(marked, {"eos_token": "<|im_end|>"}, template)
    return replace(model, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=800)


@pytest.fixture
async def service(start: Callable[..., Service], served: ServedModel) -> Service:
    return start(Role.PREFILL, Role.DECODE, served=served)


def script(service: Service, answer: str, *, tools: list[dict[str, Any]] | None = None, end: bool = True) -> None:
    """Set the model's answer to "hello" when the prompt has these functions."""
    service.script(service.tokenizer.render_chat(Chat(HELLO, tools)), answer, end=end)


def calls_of(message: dict[str, Any]) -> list[Call]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


async def test_calls_content_and_reasoning_are_separated(service: Service, family: str) -> None:
    writer = WRITERS[family]
    calls: list[Call] = [("look", {"size": 1}), ("cut-2", {"size": 2})][: 1 if writer.takes_one else 2]
    thought = ("the fox?",) if writer.thinks else ()
    script(service, writer.write("Well.", calls, *thought), tools=TOOLS)
    (choice,) = (await service.chat("hello", tools=TOOLS)).json()["choices"]
    message = choice["message"]
    assert (message["content"], calls_of(message), choice["finish_reason"]) == ("Well.", calls, "tool_calls")
    assert message.get("reasoning_content") == (thought[0] if thought else None)
    *chunks, _ = events((await service.chat("hello", tools=TOOLS, stream=True)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "".join(thought)
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert [piece["name"] for piece in pieces if "name" in piece] == [name for name, _ in calls]
    assert "".join(piece["arguments"] for piece in pieces) == "".join(json.dumps(given) for _, given in calls)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@dataclass(frozen=True)
class Received:
    """The parts of an answer that its client gets."""

    words: str
    thought: str
    calls: list[tuple[str, str]]  # name and arguments
    finish_reason: str | None


def received_whole(response: httpx.Response) -> Received:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return Received(message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"])


def received_streamed(response: httpx.Response) -> Received:
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls: list[tuple[str, str]] = []
    for piece in (call["function"] for delta in deltas for call in delta.get("tool_calls", [])):
        if "name" in piece:
            calls.append((piece["name"], ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + piece["arguments"])
    words, thought = ("".join(delta.get(key, "") for delta in deltas) for key in ("content", "reasoning_content"))
    return Received(words, thought, calls, chunks[-1]["choices"][0]["finish_reason"])


async def ask_both_ways(service: Service, **fields: Any) -> Received:
    """Return the answer, after checking that it is the same streamed and whole."""
    at_once = received_whole(await service.chat("hello", tools=TOOLS, **fields))
    assert received_streamed(await service.chat("hello", tools=TOOLS, stream=True, **fields)) == at_once
    return at_once


def check_calls(received: Received, calls: list[Call]) -> None:
    """Check that all calls before the last are complete, and also the last if the finish reason is `tool_calls`."""
    whole = [(name, json.dumps(given)) for name, given in calls]
    assert received.calls[:-1] == whole[: len(received.calls)][:-1]
    if received.finish_reason == "tool_calls":
        assert received.calls[-1] == whole[len(received.calls) - 1]
    elif received.calls:
        (name, came), (whole_name, arguments) = received.calls[-1], whole[len(received.calls) - 1]
        assert (name, arguments.startswith(came), came == arguments) == (whole_name, True, False)


@pytest.mark.slow
async def test_an_unfinished_call_has_finish_reason_stop(service: Service, family: str) -> None:
    writer = WRITERS[family]
    calls: list[Call] = [("look", {"size": 15}), ("cut-2", {"size": 2})][: 1 if writer.takes_one else 2]
    tokens = service.tokenizer.encode(writer.write("", calls))
    reasons = set()
    for length in range(3, len(tokens), 3):
        service.script(service.tokenizer.render_chat(Chat(HELLO, TOOLS)), tokens[:length])
        received = await ask_both_ways(service)
        if received.calls and received.calls[-1] != (
            "look",
            "{}",
        ):  # in gpt-oss a message without content
            check_calls(received, calls)
            reasons.add(received.finish_reason)
    assert "stop" in reasons


STOPS = ["\n", "</", "<", ">", "size", "2", '"', "}", "[ARGS]", "｜", "sep", "arg", "<|", "to=", "json", "</tool_call>"]


@pytest.mark.slow
@pytest.mark.parametrize("included", [False, True], ids=["left out", "included"])
async def test_a_stop_string_cuts_a_call_wherever_it_is(service: Service, family: str, included: bool) -> None:
    writer = WRITERS[family]
    calls: list[Call] = [("look", {"size": 15}), ("cut-2", {"size": 2})][: 1 if writer.takes_one else 2]
    answer = writer.write("Well.", calls)
    script(service, answer, tools=TOOLS)
    for stop in STOPS:
        received = await ask_both_ways(service, stop=stop, include_stop_str_in_output=included)
        assert "Well.".startswith(received.words), stop
        assert received.finish_reason in ("stop", "tool_calls"), stop
        if stop in answer:
            check_calls(received, calls)
    cut_in_arguments = await ask_both_ways(service, stop="15", include_stop_str_in_output=included)
    assert ([name for name, _ in cut_in_arguments.calls], cut_in_arguments.finish_reason) == (["look"], "stop")


async def test_calls_and_results_can_be_sent_back(service: Service, family: str) -> None:
    calls: list[Call] = [("look", {"size": 1})]
    script(service, WRITERS[family].write("Well.", calls), tools=TOOLS)
    (choice,) = (await service.chat("hello", tools=TOOLS)).json()["choices"]
    result = {"role": "tool", "content": "seen", "tool_call_id": choice["message"]["tool_calls"][0]["id"]}
    body = {"model": "tiny", "messages": [*HELLO, choice["message"], result], "tools": TOOLS}
    response = await service.http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert response.status_code == 200, response.text
    received = {key: body[key] for key in ("messages", "tools")}
    tokens = (await service.http.post("/tokenize", json=received)).json()["tokens"]
    assert "seen" in service.tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("family", ["harmony"])
async def test_the_frame_of_a_harmony_answer_is_not_shown(service: Service) -> None:
    answer = "<|channel|>analysis<|message|>the fox?<|end|><|start|>assistant<|channel|>final<|message|>the dog"
    script(service, answer)
    (choice,) = (await service.chat("hello", max_tokens=100)).json()["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("the fox?", "the dog")
    assert choice["finish_reason"] == "stop"
    prompt = service.tokenizer.render_chat(Chat(HELLO))
    (choice,) = (await service.complete(prompt, max_tokens=100)).json()["choices"]
    assert choice["text"] == "analysisthe fox?assistantfinalthe dog"


async def test_a_call_of_an_unknown_function_is_shown_as_text_with_its_markers(service: Service, family: str) -> None:
    text = WRITERS[family].write("", [("unknown", {"size": 1})])
    script(service, text, tools=TOOLS)
    (choice,) = (await service.chat("hello", tools=TOOLS)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


@pytest.fixture(scope="session")
def grammars_of(
    model: ServedModel, marked: Backend, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[ServedModel, str], XGrammarBackend]]:
    """Return a function that gives the grammar backend of a family; each backend is a process."""
    started: dict[str, XGrammarBackend] = {}

    def start(served: ServedModel, family: str) -> XGrammarBackend:
        if family not in started:
            folder: Path = tmp_path_factory.mktemp("tokenizer")
            marked.save(str(folder / "tokenizer.json"))
            (folder / "chat_template.jinja").write_text(FAMILIES[family])
            started[family] = XGrammarBackend(
                GrammarVocabulary(str(folder), served.vocab_size, list(served.eos_token_ids))
            )
            started[family].open(StructuredOutputsParams(choice=["any"]))  # starting takes seconds
        return started[family]

    yield start
    for grammars in started.values():
        grammars.close()


@pytest.fixture
async def bound(
    start: Callable[..., Service],
    served: ServedModel,
    family: str,
    grammars_of: Callable[[ServedModel, str], XGrammarBackend],
) -> Service:
    """A service whose engines apply grammars."""
    return start(Role.PREFILL, Role.DECODE, served=served, grammars=grammars_of(served, family))


NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.slow
async def test_required_calls_strict_calls_and_content_fit_their_schemas(bound: Service, family: str) -> None:
    """Only the grammar makes the outputs fit: the model writes the right beginning, and then random tokens."""
    begun = BEGUN[family]
    asked: dict[str, dict[str, Any]] = {
        "required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        "named": {"tools": TOOLS, "tool_choice": NAMED},
        "strict": {"tools": STRICT, "parallel_tool_calls": False},
        "beside words that must fit": {"tools": STRICT, "parallel_tool_calls": False, "response_format": AS_COLOR},
    }
    for seed, (kind, fields) in enumerate(asked.items()):
        script(bound, begun, tools=TOOLS, end=False)
        response = await bound.chat("hello", seed=seed, max_tokens=300, **fields)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        ((name, arguments),) = calls_of(choice["message"])
        assert (choice["finish_reason"], name == "look" or family == "mistral-list") == ("tool_calls", True), kind
        jsonschema.validate(arguments, SIZE)
    for seed, tools in enumerate([TOOLS, None]):
        script(bound, FINAL.get(family, ""), tools=tools, end=False)
        shape = {"response_format": AS_COLOR} | ({"tools": tools} if tools else {})
        (choice,) = (await bound.chat("hello", seed=seed, max_tokens=300, **shape)).json()["choices"]
        if choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]:
            jsonschema.validate(json.loads(choice["message"]["content"]), COLOR)
        else:
            assert family not in FINAL or choice["finish_reason"] == "length"

    # Grammars allow the special tokens of the markers.
    script(bound, BEGUN[family], tools=TOOLS, end=False)
    named = {"tools": TOOLS, "tool_choice": NAMED, "logprobs": True, "max_tokens": 300}
    (choice,) = (await bound.chat("hello", **named)).json()["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    wished = bound.tokenizer.encode(BEGUN[family])
    assert tokens[: len(wished)] == [bound.tokenizer.token_text(token) for token in wished]
