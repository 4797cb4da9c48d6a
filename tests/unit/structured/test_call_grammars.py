"""Grammars of tool calls, for each format, on outputs as its models write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import xgrammar

from baton.engine.text import FunctionSignature, GrammarSpec, GrammarToolCallFormat, ToolCallArguments, ToolCallStart
from baton.engine.text.parsers import FORMATS

from ...helpers.family_answers import WRITERS, Writer, joined

SIZE = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
FUNCTIONS = [FunctionSignature("look", SIZE), FunctionSignature("cut-2", SIZE)]
FORMS = {form.name: form for form in FORMATS if isinstance(form, GrammarToolCallFormat)}
NAMES = [name for name in WRITERS if " " not in name and WRITERS[name].form in FORMS]  # without variants of a form
Accepts = Callable[[GrammarSpec, str], bool]


@pytest.fixture(scope="module")
def accepts() -> Accepts:
    """Return a function that tells if a text is a complete answer of a grammar."""
    vocabulary = [bytes([byte]) for byte in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=257, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def fits(grammar: GrammarSpec, text: str) -> bool:
        tag = json.dumps({"type": "structural_tag", "format": grammar})
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
        return matcher.accept_string(text) and matcher.accept_token(256)

    return fits


@pytest.fixture(params=NAMES)
def writer(request: pytest.FixtureRequest) -> Writer:
    return WRITERS[request.param]


def test_the_grammar_of_required_calls_accepts_only_calls(accepts: Accepts, writer: Writer) -> None:
    grammar = FORMS[writer.form].calls_grammar(FUNCTIONS)
    assert accepts(grammar, writer.write("", [("look", {"size": 1})]))
    assert not accepts(grammar, writer.write("", [("look", {"size": "one"})]))
    assert not accepts(grammar, writer.write("", [("unknown", {"size": 1})]))
    assert not accepts(grammar, writer.write("Well.", []))
    assert not accepts(grammar, "")


def test_several_calls_are_accepted_if_the_form_has_them(accepts: Accepts, writer: Writer) -> None:
    form, two = FORMS[writer.form], writer.write("", [("look", {"size": 1}), ("cut-2", {"size": 2})])
    assert accepts(form.calls_grammar(FUNCTIONS), two) is not form.takes_one
    assert not accepts(form.calls_grammar(FUNCTIONS, at_most_one=True), two)
    assert accepts(form.text_and_calls_grammar(FUNCTIONS), two) is not form.takes_one
    assert not accepts(form.text_and_calls_grammar(FUNCTIONS, at_most_one=True), two)


def test_calls_within_text_must_be_valid(accepts: Accepts, writer: Writer) -> None:
    grammar = FORMS[writer.form].text_and_calls_grammar(FUNCTIONS)
    words = "Well." if writer.takes_both else ""
    assert accepts(grammar, writer.write("Well.", []))
    assert accepts(grammar, writer.write(words, [("look", {"size": 1})]))
    assert not accepts(grammar, writer.write(words, [("look", {"size": "one"})]))
    assert not accepts(grammar, writer.write(words, [("unknown", {"size": 1})]))


def test_calls_of_llama_that_begin_with_their_type_must_be_valid_too(accepts: Accepts) -> None:
    grammar, write = FORMS["llama3"].text_and_calls_grammar(FUNCTIONS), WRITERS["llama3 with types"].write
    assert accepts(grammar, write("", [("look", {"size": 1})]))
    assert not accepts(grammar, write("", [("look", {"size": "one"})]))


def test_an_answer_may_be_text_that_fits_a_schema_or_calls(accepts: Accepts, writer: Writer) -> None:
    form = FORMS[writer.form]
    color: dict[str, Any] = {"type": "object", "properties": {"color": {"enum": ["red"]}}, "required": ["color"]}
    words = form.answer_grammar({"type": "json_schema", "json_schema": color})
    grammar = {"type": "or", "elements": [form.calls_grammar(FUNCTIONS), words]}
    assert accepts(grammar, writer.write('{"color": "red"}', []))
    assert accepts(grammar, writer.write("", [("look", {"size": 1})]))
    assert not accepts(grammar, writer.write('{"color": "blue"}', []))
    if writer.takes_both:
        assert not accepts(grammar, writer.write('{"color": "red"}', [("look", {"size": 1})]))
    assert not accepts(grammar, writer.write("", [("look", {"size": "one"})]))


COLORED = FunctionSignature(
    "paint",
    {
        "type": "object",
        "properties": {
            "words": {"type": "string"},
            "color": {"enum": ["red", "green"]},
            "sizes": {"type": "array", "items": {"type": "integer"}},
            "title": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "is_wet": {"type": "boolean"},
        },
        "required": ["words"],
    },
)
ANYTHING = FunctionSignature("paint", {"type": "object", "additionalProperties": True})
TAGGED = [name for name in NAMES if name in ("qwen3-coder", "glm4.5", "minimax-m2", "deepseek3.2")]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({"words": 'a <b> & "c"\n</tool_call>\n{'}, True),
        ({"words": "", "color": "green", "sizes": [1, 2], "title": "hello", "is_wet": True}, True),
        ({"words": "5", "title": None}, True),
        ({"words": "a", "color": "blue"}, False),
        ({"words": "a", "sizes": ["1"]}, False),
        ({"words": "a", "is_wet": "True"}, False),
        ({"words": "a", "more": "b"}, False),
        ({"color": "red"}, False),
        ({}, False),
    ],
)
def test_values_between_tags_are_parsed_to_values_that_fit(
    accepts: Accepts, name: str, given: dict[str, Any], fits: bool
) -> None:
    form, text = FORMS[name], WRITERS[name].write("", [("paint", given)])
    assert accepts(form.calls_grammar([COLORED]), text) is fits
    assert accepts(form.text_and_calls_grammar([COLORED]), text) is fits
    assert accepts(form.calls_grammar([ANYTHING]), text)
    begins, *told = joined(form.new_parser({"paint": COLORED.arguments}).push(text, finished=True))
    assert begins == ToolCallStart(0, "paint")
    assert (
        fits is False or json.loads("".join(part.text for part in told if isinstance(part, ToolCallArguments))) == given
    )


def test_a_call_of_qwen3_coder_without_its_outer_tags_must_fit_as_well(accepts: Accepts) -> None:
    call = "<function=look>\n<parameter=size>\n{}\n</parameter>\n</function>"
    grammar = FORMS["qwen3-coder"].text_and_calls_grammar(FUNCTIONS)
    assert accepts(grammar, "Well.\n" + call.format("1"))
    assert not accepts(grammar, "Well.\n" + call.format("one"))
    assert not accepts(FORMS["qwen3-coder"].calls_grammar(FUNCTIONS), call.format("1"))


def test_a_call_without_the_usual_blanks_must_fit_as_well(accepts: Accepts) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"size": "one"}}</tool_call>'
    assert not accepts(FORMS["hermes"].text_and_calls_grammar(FUNCTIONS), call)


def test_glm_calls_may_have_line_breaks_or_none(accepts: Accepts) -> None:
    for grammar in (FORMS["glm4.5"].calls_grammar(FUNCTIONS), FORMS["glm4.5"].text_and_calls_grammar(FUNCTIONS)):
        assert accepts(grammar, WRITERS["glm4.5 in one line"].write("", [("look", {"size": 1})]))
        assert not accepts(grammar, WRITERS["glm4.5 in one line"].write("", [("look", {"size": "one"})]))


def test_gpt_oss_may_reason_first_and_writes_one_message_to_an_allowed_recipient(accepts: Accepts) -> None:
    write, form = WRITERS["harmony"].write, FORMS["harmony"]
    thought = "hm, <b> {1}"
    assert accepts(form.calls_grammar(FUNCTIONS), write("", [("look", {"size": 1})], thought))
    assert accepts(form.answer_grammar({"type": "const_string", "value": "yes"}), write("yes", [], thought))
    assert accepts(form.text_and_calls_grammar(FUNCTIONS), write("Well.", [("look", {"size": 1})], thought))
    as_templates_have_it = ' to=functions.look<|channel|>commentary json<|message|>{"size": 1}'
    assert accepts(form.calls_grammar(FUNCTIONS), as_templates_have_it)
    behind = "<|channel|>final<|message|>yes<|end|><|start|>assistant"
    for grammar in (form.calls_grammar(FUNCTIONS), form.text_and_calls_grammar(FUNCTIONS)):
        assert not accepts(grammar, behind + as_templates_have_it.replace("1", '"1"'))
