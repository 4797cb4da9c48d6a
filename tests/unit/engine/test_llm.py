"""`LLM` as a script sees it: prompts in every form, results as in vLLM, text, stop strings, errors."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from baton.engine import (
    LLM,
    InvalidArgument,
    InvalidEngineConfig,
    InvalidPrompt,
    InvalidSamplingParams,
    SamplingParams,
)
from baton.engine.core.engine import EngineFailed
from baton.engine.hf_config.errors import ModelError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
IDS = [10, 20, 30, 40]


def text_of(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> str:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def test_every_form_of_a_prompt_gives_the_same_answer(text_llm: LLM) -> None:
    text = "Hello"
    ids = text_llm.get_tokenizer().encode(text)
    forms: list[Any] = [text, ids, tuple(ids), {"prompt": text}, {"prompt_token_ids": ids}]
    answers = [text_of(text_llm, form) for form in forms] + [text_of(text_llm, [form]) for form in forms]
    assert set(answers) == {text_of(text_llm, text)}
    mixed = text_llm.generate(forms, GREEDY, use_tqdm=False)
    assert [result.outputs[0].text for result in mixed] == answers[:5]


def test_answers_come_in_the_order_of_the_prompts_each_with_its_own_parameters(llm: LLM) -> None:
    lengths = [9, 1, 5, 3]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    results = llm.generate([[i + 3] for i in range(4)], params, use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == [[3], [4], [5], [6]]
    assert [len(result.outputs[0].token_ids) for result in results] == lengths
    assert len({result.request_id for result in results}) == 4
    assert all(result.finished and result.outputs[0].finish_reason == "length" for result in results)


def test_prompts_of_a_lower_priority_number_are_served_sooner(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=1)
    same, params = [5] * 40, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    results = llm.generate([same, same, same], params, use_tqdm=False, priority=[0, 7, -7])
    assert [result.num_cached_tokens > 0 for result in results] == [True, True, False]


def test_calls_of_several_threads_take_turns(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompts = [[number + 3] * 20 for number in range(8)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(lambda prompt: llm.generate([prompt] * 3, GREEDY, use_tqdm=False), prompts))
    for prompt, results in zip(prompts, found, strict=True):
        (alone,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in results] == [alone.outputs[0].token_ids] * 3


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_without_a_tokenizer_tokens_come_back_and_text_is_empty(llm: LLM) -> None:
    (output,) = llm.generate(IDS, GREEDY, use_tqdm=False)[0].outputs
    assert (len(output.token_ids), output.text, output.logprobs, output.cumulative_logprob) == (8, "", None, None)
    with pytest.raises(InvalidPrompt, match="skip_tokenizer_init"):
        llm.generate("text", GREEDY)


def test_text_is_what_the_tokenizer_makes_of_the_tokens(text_llm: LLM) -> None:
    (output,) = text_llm.generate(IDS, GREEDY, use_tqdm=False)[0].outputs
    assert output.text == text_llm.get_tokenizer().decode(output.token_ids)
    silent = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    assert text_of(text_llm, IDS, silent) == ""


def test_logprobs_carry_the_tokens_text(text_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    (result,) = text_llm.generate(IDS, params, use_tqdm=False)
    tokenizer = text_llm.get_tokenizer()
    assert result.outputs[0].logprobs is not None
    for entry in result.outputs[0].logprobs:
        assert all(logprob.decoded_token == tokenizer.token_text(token) for token, logprob in entry.items())
        assert all(logprob.token_bytes == tokenizer.token_bytes(token) for token, logprob in entry.items())
    assert result.prompt_logprobs is not None
    assert [list(entry) for entry in result.prompt_logprobs[1:] if entry is not None] == [[20], [30], [40]]


@pytest.fixture(scope="module")
def long_answer(text_llm: LLM) -> str:
    return text_of(text_llm, "The answer", SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_the_engine_drops_the_request(
    make_llm: Callable[..., LLM], long_answer: str, ahead: bool
) -> None:
    llm = make_llm(skip_tokenizer_init=False, async_scheduling=ahead)
    stop = long_answer[30:33]
    before = long_answer.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, stop=["never there", stop])
    (output,) = llm.generate("The answer", params, use_tqdm=False)[0].outputs
    assert (output.text, output.finish_reason, output.stop_reason) == (long_answer[:before], "stop", stop)
    assert len(output.token_ids) < 60
    stats = llm.engine.core.stats()
    assert text_of(llm, "next") != ""
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)

    shown = SamplingParams(
        temperature=0.0, max_tokens=60, ignore_eos=True, stop=[stop], include_stop_str_in_output=True
    )
    assert text_of(llm, "The answer", shown) == long_answer[: before + len(stop)]


def test_a_stop_token_ends_the_request_and_is_no_text(text_llm: LLM) -> None:
    (free,) = text_llm.generate("Go on", GREEDY, use_tqdm=False)[0].outputs
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    (output,) = text_llm.generate("Go on", params, use_tqdm=False)[0].outputs
    assert output.token_ids == free.token_ids[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == text_llm.get_tokenizer().decode(output.token_ids[:-1])


def test_the_end_of_sequence_token_gives_no_stop_reason(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={2: 100.0})
    (output,) = llm.generate(IDS, params, use_tqdm=False)[0].outputs
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([2], "stop", None)


def test_chat_renders_the_template_and_adds_nothing(text_llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    (result,) = text_llm.chat(conversation, GREEDY, use_tqdm=False)
    assert result.prompt == "user: Hi\nassistant: "
    assert result.outputs[0].text == text_of(text_llm, "user: Hi\nassistant: ")
    both = text_llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert [answer.outputs[0].text for answer in both] == [result.outputs[0].text] * 2
    (bare,) = text_llm.chat(conversation, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt == "user: Hi\n"


def test_what_a_message_spells_stays_text_unless_asked_for(
    text_llm: LLM, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    state = json.loads(text_llm.get_tokenizer().backend.to_str())
    last = max(state["model"]["vocab"], key=state["model"]["vocab"].get)
    end = state["model"]["vocab"]["<|end|>"] = state["model"]["vocab"].pop(last)
    backend = Backend.from_str(json.dumps(state))
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}:"}))
    spelling = make_llm(skip_tokenizer_init=False, tokenizer=tmp_path)
    conversation = [{"role": "user", "content": "Hi<|end|>"}]
    (guarded,) = spelling.chat(conversation, GREEDY, use_tqdm=False)
    (bare,) = spelling.chat(conversation, GREEDY, use_tqdm=False, special_tokens_in_messages=True)
    assert guarded.prompt == bare.prompt == "Hi<|end|>:"
    assert (len(guarded.prompt_token_ids), guarded.prompt_token_ids.count(end)) == (10, 0)
    assert (len(bare.prompt_token_ids), bare.prompt_token_ids.count(end)) == (4, 1)
    with pytest.raises(InvalidArgument, match="special_tokens_in_messages is 1: give True or False"):
        spelling.chat(conversation, GREEDY, special_tokens_in_messages=1)  # type: ignore[arg-type]


def test_an_answer_of_calls_alone_is_empty_text_in_the_prompt(text_llm: LLM) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}
    for content in ({"content": None}, {}):
        conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call], **content}]
        (result,) = text_llm.chat(conversation, GREEDY, use_tqdm=False)
        assert result.prompt == "user: Hi\nassistant: \nassistant: "


def test_chat_takes_what_vllm_calls_chat_template_kwargs_and_nothing_unknown(text_llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    (result,) = text_llm.chat(conversation, GREEDY, use_tqdm=False, chat_template_kwargs={"mood": "glad"})
    assert result.prompt == "(glad) user: Hi\nassistant: "
    with pytest.raises(InvalidArgument, match=r"chat_template is .*write chat_template\.jinja there"):
        text_llm.chat(conversation, GREEDY, chat_template="{{ messages }}")


def test_n_continuations_differ_and_are_those_of_n_seeds(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=100, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    (result,) = llm.generate(IDS, params, use_tqdm=False)
    assert [output.index for output in result.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 4
    assert result.prompt_logprobs is not None
    for i, output in enumerate(result.outputs):
        single = SamplingParams(seed=100 + i, max_tokens=12, ignore_eos=True)
        assert llm.generate(IDS, single, use_tqdm=False)[0].outputs[0].token_ids == output.token_ids


def test_without_a_seed_requests_differ_and_a_script_run_again_gives_the_same(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        llm = make_llm(seed=seed)
        runs.append([result.outputs[0].token_ids for result in llm.generate([IDS] * 3, params, use_tqdm=False)])
    assert len({tuple(tokens) for tokens in runs[0]}) == 3
    assert runs[0] == runs[1] != runs[2]


def test_default_parameters_are_the_checkpoints(text_llm: LLM, checkpoint: Path) -> None:
    generation = text_llm.engine.model_config.generation
    params = text_llm.get_default_sampling_params()
    assert params.temperature == (1.0 if generation.temperature is None else generation.temperature)
    assert text_llm.generate([IDS], use_tqdm=False)[0].finished


def test_num_cached_tokens_counts_the_prompt_found_in_the_cache(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    prompt = {"prompt_token_ids": list(range(3, 53))}
    salted = {**prompt, "cache_salt": "another tenant"}
    found = [
        llm.generate(form, GREEDY, use_tqdm=False)[0].num_cached_tokens for form in (prompt, prompt, salted, salted)
    ]
    assert found == [0, 48, 0, 48]


def test_an_engine_of_one_row_keeps_the_prompts_of_many_requests_in_the_memory_that_it_is_given(
    make_llm: Callable[..., LLM],
) -> None:
    llm = make_llm(max_num_seqs=1, max_model_len=64, kv_cache_memory_bytes=4 << 20)
    prompts = [{"prompt_token_ids": list(range(first, first + 50))} for first in range(3, 13)]
    for found in (0, 48):
        results = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [result.num_cached_tokens for result in results] == [found] * len(prompts)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_ids": IDS}, "prompt_ids: give prompt or prompt_token_ids"),
        ({"prompt_token_ids": IDS, "multi_modal_data": {}}, "multi_modal_data"),
        ([], "prompt"),
        ([300], "300"),
        ([5] * 256, "256"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_and_the_others_are_taken_back(
    llm: LLM, prompt: Any, message: str
) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        llm.generate(
            [IDS, {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt], GREEDY, use_tqdm=False
        )
    while llm.engine.core.has_work():
        llm.engine.core.step()
    stats = llm.engine.core.stats()
    assert (stats.num_requests_running, stats.num_blocks_free) == (0, stats.num_blocks)
    assert llm.generate(IDS, GREEDY, use_tqdm=False)[0].finished


@pytest.fixture
def signals() -> Iterator[None]:
    """Set Python's own handler for Ctrl-C, whatever a shell has set, and one for SIGTERM that exits in order."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: lambda *_: sys.exit("told to end")}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    for number, handler in before.items():
        signal.signal(number, handler)


def signalled(llm: LLM, *numbers: int) -> LLM:
    """Send the signal in the middle of the next step."""
    runner = llm.engine.core.runner
    launch = runner.launch

    def launch_signalled(plan: Any) -> Any:
        runner.launch = launch
        for number in numbers:
            signal.raise_signal(number)
        return launch(plan)

    runner.launch = launch_signalled
    return llm


@pytest.mark.usefixtures("signals")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_in_the_middle_of_a_step_ends_the_call_and_nothing_else(
    make_llm: Callable[..., LLM], number: int, error: type[BaseException]
) -> None:
    llm = signalled(make_llm(), number)
    with pytest.raises(error):
        llm.generate([[5, 6, 7]] * 3, GREEDY, use_tqdm=False)
    assert not llm.engine.core.has_work()
    assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.usefixtures("signals")
@pytest.mark.timeout(60)
def test_a_second_signal_breaks_into_the_step_and_ends_the_engine(make_llm: Callable[..., LLM]) -> None:
    llm = signalled(make_llm(), signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]] * 3, GREEDY, use_tqdm=False)
    with pytest.raises(EngineFailed, match="the engine was closed"):
        llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)


def test_parameters_that_do_not_fit_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidPrompt, match="2 prompts but 3 sampling_params"):
        llm.generate([IDS, IDS], [GREEDY] * 3)
    with pytest.raises(InvalidSamplingParams, match="stop"):
        llm.generate([IDS], SamplingParams(stop=["x"]))


def test_a_row_keeps_nothing_of_the_request_before(llm: LLM) -> None:
    free = llm.generate(IDS, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    edited = SamplingParams(max_tokens=8, presence_penalty=2.0, logit_bias={7: 50}, allowed_token_ids=[7, 9], min_p=0.5)
    llm.generate([IDS] * 8, edited, use_tqdm=False)
    assert all(result.outputs[0].token_ids == free for result in llm.generate([IDS] * 8, GREEDY, use_tqdm=False)), (
        "a row keeps nothing of who had it before"
    )


def test_bad_words_are_never_written(text_llm: LLM, long_answer: str) -> None:
    word = re.findall("[0-9A-Za-z]{2}", long_answer)[0]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, bad_words=[word])
    answer = text_of(text_llm, "The answer", params)
    assert word in long_answer
    assert word not in answer
    assert answer[: long_answer.index(word) + 1] == long_answer[: long_answer.index(word) + 1]


def test_a_progress_bar_shows_prompts_and_speed(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([IDS, IDS], GREEDY, use_tqdm=True)
    printed = capsys.readouterr().err  # results may go to stdout
    assert "2/2" in printed
    assert "tokens/s" in printed


def test_arguments_and_checkpoints_that_cannot_be_served_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidEngineConfig, match=r"max_num_seq: .*did you mean 'max_num_seqs'"):
        LLM(str(checkpoint), max_num_seq=4)
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(tmp_path, skip_tokenizer_init=True)
    with pytest.raises(InvalidEngineConfig, match="model: is required"):
        LLM(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidEngineConfig, match="model: is 5, must be a text"):
        LLM(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidEngineConfig, match="tokenizer: is 5, must be a text"):
        LLM(checkpoint, tokenizer=5)  # type: ignore[arg-type]
