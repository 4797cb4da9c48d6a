"""The requests of `baton bench serve` and their times: data sets, arrivals, contradictory options."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.cli.load.options import DataSet, InvalidLoad, LoadBackend, RampUp, ServeLoad
from baton.cluster.cli.load.requests import LoadRequest, delays_s, load_requests, paced

from ...helpers.gateway_service import Clock


class Letters:
    """A tokenizer whose tokens are characters."""

    async def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    async def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def load(**changed: Any) -> ServeLoad:
    return ServeLoad(**{"num_prompts": 20, "num_warmups": 0, **changed})


def requests_of(**changed: Any) -> list[LoadRequest]:
    asked = load(**changed)
    asked.check()
    return asyncio.run(load_requests(asked, Letters()))


def conversation(asked: str, answered: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_random_prompts_have_the_requested_lengths_and_a_common_prefix() -> None:
    found = requests_of(input_len=100, random_range_ratio=0.5, random_prefix_len=7, output_len=10, num_warmups=2)
    assert len(found) == 22
    assert {tuple(each.prompt[:7]) for each in found} == {tuple(found[0].prompt[:7])}
    lengths = [len(each.prompt) - 7 for each in found]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 5
    assert all(5 <= each.output_tokens <= 15 for each in found)
    assert {len(each.prompt) for each in requests_of(input_len=9)} == {9}


def test_a_seed_repeats_its_prompts_and_another_one_does_not() -> None:
    assert requests_of(seed=3) == requests_of(seed=3) != requests_of(seed=4)


def test_chat_requests_have_text_prompts() -> None:
    assert all(isinstance(each.prompt, str) and len(each.prompt) == 8 for each in _chats(input_len=8))


def _chats(**changed: Any) -> list[LoadRequest]:
    return requests_of(backend=LoadBackend.OPENAI_CHAT, **changed)


def test_a_conversation_becomes_its_first_turn_with_the_length_of_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    long, short = conversation("a" * 1025, "b" * 10), conversation("a", "b")
    path.write_text(json.dumps([conversation("a question", "an answer"), long, short, {"conversations": []}]))
    found = requests_of(dataset_name=DataSet.SHAREGPT, dataset_path=path, num_prompts=3, num_warmups=1)
    assert found == [LoadRequest("a question", len("an answer"))] * 4
    once = requests_of(dataset_name=DataSet.SHAREGPT, dataset_path=path, no_oversample=True, output_len=5)
    assert once == [LoadRequest("a question", 5)]


def test_lines_of_prompts_state_the_lengths_of_their_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "one", "output_tokens": 3}, {"prompt": "two"})
    found = requests_of(dataset_name=DataSet.CUSTOM, dataset_path=path, num_prompts=2)
    assert sorted((str(each.prompt), each.output_tokens) for each in found) == [("one", 3), ("two", 256)]


def test_lines_of_chats_may_state_a_predicted_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "one", "prediction": "1"}, {"prompt": "two"})
    found = _chats(dataset_name=DataSet.CUSTOM, dataset_path=path, num_prompts=2, disable_shuffle=True)
    assert [each.prediction for each in found] == ["1", None]
    with pytest.raises(InvalidLoad, match=r"line 1.*openai-chat"):
        requests_of(dataset_name=DataSet.CUSTOM, dataset_path=path)


def test_requests_of_a_trace_have_its_times_and_share_its_prefixes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 5000, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]},
        {"timestamp": 6000, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]},
        {"timestamp": 9000, "input_length": 30, "output_length": 6},
        {"timestamp": 9000, "input_length": 30, "output_length": 6},
    ]
    path = write(tmp_path / "trace.jsonl", *lines)
    found = requests_of(dataset_name=DataSet.TIMED_TRACE, dataset_path=path, trace_speed=2.0)
    assert [each.at_s for each in found] == [0.0, 0.5, 2.0, 2.0]
    assert [(len(each.prompt), each.output_tokens) for each in found] == [(600, 4), (700, 5), (30, 6), (30, 6)]
    assert found[0].prompt[:512] == found[1].prompt[:512]
    assert found[0].prompt[512:600] != found[1].prompt[512:600]
    assert found[2].prompt != found[3].prompt, "prompts without hash ids must share nothing"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (DataSet.SHAREGPT, "{", "form of ShareGPT"),
        (DataSet.SHAREGPT, '[{"conversations": [{}, {}]}]', "form of ShareGPT"),
        (DataSet.SHAREGPT, "[]", "no conversation"),
        (DataSet.CUSTOM, "\n", "no prompts"),
        (DataSet.CUSTOM, '{"prompt": "x"}\n{"prompt": 1}', "line 2"),
        (DataSet.TIMED_TRACE, '{"timestamp": 0}', "line 1"),
    ],
)
def test_a_file_of_another_format_is_refused_by_its_name(tmp_path: Path, name: DataSet, text: str, said: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(InvalidLoad, match=f"{path}.*{said}"):
        requests_of(dataset_name=name, dataset_path=path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataset_name": DataSet.CUSTOM}, "needs --dataset-path"),
        ({"dataset_path": Path("x")}, "has no --dataset-path"),
        ({"sweep_rate": "1", "sweep_concurrency": "1"}, "cannot be combined"),
        ({"sweep_rate": "1", "request_rate": 2.0}, "--request-rate and --sweep-rate cannot be combined"),
        ({"ramp_up_strategy": RampUp.LINEAR}, "give all"),
        ({"ramp_up_end_rps": 2.0}, "give all"),
        ({"sweep_concurrency": "1,1.5"}, "'1,1.5': give whole numbers of 1 or more"),
        ({"metric_percentiles": "101"}, "give numbers of 0 to 100"),
        ({"goodput": ["itl:3"]}, "give ttft, tpot or e2el"),
        ({"extra_body": "[]"}, "must be a JSON object"),
        ({"extra_body": "{"}, "not JSON"),
        ({"header": ["x"]}, "--header 'x': give KEY=VALUE"),
        ({"metadata": ["=1"]}, "--metadata '=1': give KEY=VALUE"),
        (
            {"dataset_name": DataSet.TIMED_TRACE, "dataset_path": Path("x"), "request_rate": 1.0},
            "leave --request-rate out, change --trace-speed, or give --no-self-timed",
        ),
        ({"self_timed": True}, "--dataset-name timed_trace"),
        ({"url": "http://a", "port": 9}, "leave --host and --port out"),
        ({"endpoint": "v1/completions"}, "--endpoint v1/completions: give a path"),
        ({"endpoint": "/v1/chat/completions"}, "needs --backend openai-chat"),
        ({"endpoint": "/a/completions", "backend": LoadBackend.OPENAI_CHAT}, "needs --backend openai"),
        ({"chat_template_kwargs": "{}[", "backend": LoadBackend.OPENAI_CHAT}, "--chat-template-kwargs is not JSON"),
        ({"chat_template_kwargs": '{"a": 1}'}, "--chat-template-kwargs needs --backend openai-chat"),
        ({"percentile_metrics": "ttft,client_queue_time"}, "--percentile-metrics client_queue_time: give ttft, "),
        ({"dataset_name": DataSet.PREFIX_REPETITION, "dataset_path": Path("x")}, "prefix_repetition has no"),
    ],
)
def test_contradictory_options_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidLoad, match=said):
        load(**options).check()


@pytest.mark.parametrize(
    ("options", "server"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "a"}, "http://a:8000"),
        ({"port": 9}, "http://127.0.0.1:9"),
        ({"host": "::1", "port": 9}, "http://[::1]:9"),
        ({"url": "https://a/b/v1"}, "https://a/b"),
    ],
)
def test_the_server_is_a_url_or_a_host_and_a_port(options: dict[str, Any], server: str) -> None:
    asked = load(**options)
    asked.check()
    assert asked.at(asked.route) == f"{server}/v1/completions"
    assert load(**options, endpoint="/x").route == "/x"


def test_each_prefix_is_repeated_equally_often_with_different_suffixes() -> None:
    lengths = {"prefix_repetition_prefix_len": 9, "prefix_repetition_suffix_len": 3, "num_prompts": 12}
    asked = {"dataset_name": DataSet.PREFIX_REPETITION, "prefix_repetition_num_prefixes": 4, **lengths}
    found = requests_of(**asked)
    assert {(len(each.prompt), each.output_tokens) for each in found} == {(12, 128)}
    counts = Counter(tuple(each.prompt[:9]) for each in found)
    assert sorted(counts.values()) == [3] * 4
    assert len({tuple(each.prompt) for each in found}) == 12
    assert [tuple(each.prompt[:9]) for each in found] != list(counts) * 3
    in_turn = [tuple(each.prompt[:9]) for each in requests_of(**asked, disable_shuffle=True)]
    assert in_turn == in_turn[:4] * 3
    assert {each.output_tokens for each in requests_of(**asked, output_len=7)} == {7}


def test_the_order_of_a_file_is_kept_on_request(tmp_path: Path) -> None:
    texts = [f"prompt number {number}" for number in range(20)]
    lines = write(tmp_path / "lines.jsonl", *[{"prompt": text} for text in texts])
    turns = tmp_path / "turns.json"
    turns.write_text(json.dumps([conversation(text, "an answer") for text in texts]))
    for dataset, path in ((DataSet.CUSTOM, lines), (DataSet.SHAREGPT, turns)):
        asked = {"dataset_name": dataset, "dataset_path": path}
        assert [each.prompt for each in requests_of(**asked, disable_shuffle=True)] == texts
        assert [each.prompt for each in requests_of(**asked)] != texts


def test_a_trace_is_sent_at_another_rate_on_request(tmp_path: Path) -> None:
    lines = [{"timestamp": 1000 * at, "input_length": 4, "output_length": 2, "hash_ids": [at]} for at in range(3)]
    trace = {"dataset_name": DataSet.TIMED_TRACE, "dataset_path": write(tmp_path / "trace.jsonl", *lines)}
    assert [each.at_s for each in requests_of(**trace)] == [0.0, 1.0, 2.0]
    assert [each.at_s for each in requests_of(**trace, self_timed=False, request_rate=5.0)] == [None] * 3


def test_burstiness_changes_the_variance_of_delays_and_not_their_mean() -> None:
    spreads = {}
    for burstiness in (0.25, 1.0, 4.0, math.inf):
        delays = list(delays_s(load(request_rate=10.0, burstiness=burstiness), 4000))
        assert statistics.fmean(delays) == pytest.approx(0.1, rel=0.1)
        spreads[burstiness] = statistics.pstdev(delays) / statistics.fmean(delays)
    assert spreads[0.25] == pytest.approx(2.0, rel=0.15)
    assert spreads[1.0] == pytest.approx(1.0, rel=0.15)
    assert spreads[4.0] == pytest.approx(0.5, rel=0.15)
    assert spreads[math.inf] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("strategy", "middle"), [(RampUp.LINEAR, 1 / 50.5), (RampUp.EXPONENTIAL, 1 / 10)], ids=["linear", "exponential"]
)
def test_a_ramp_up_rises_from_its_first_rate_to_its_last(strategy: RampUp, middle: float) -> None:
    ramp = {"ramp_up_strategy": strategy, "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 100.0}
    delays = list(delays_s(load(burstiness=math.inf, **ramp), 101))
    assert (delays[0], delays[50], delays[-1]) == pytest.approx((1.0, middle, 0.01))


@pytest.mark.parametrize("rate", [0.0, math.inf])
def test_without_a_rate_all_requests_are_sent_at_once(rate: float) -> None:
    assert set(delays_s(load(request_rate=rate), 5)) == {0.0}


def test_a_late_request_does_not_delay_the_later_ones() -> None:
    clock, sent = Clock(), []
    began_s = clock.now_s

    async def sleep(seconds: float) -> None:
        clock.now_s += seconds

    async def send() -> None:
        requests = [LoadRequest("x", 1, at_s) for at_s in (0.0, 1.0, 2.0, 6.0)]
        async for _ in paced(load(), requests, clock, sleep):
            sent.append(clock.now_s - began_s)
            if len(sent) == 2:
                clock.now_s += 3.0  # the client was busy

    asyncio.run(send())
    assert sent == [0.0, 1.0, 4.0, 6.0]
