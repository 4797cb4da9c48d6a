"""`/v1/completions` as its clients see it."""

from __future__ import annotations

from typing import Any

from ...helpers.gateway_service import Service, events


async def test_a_prompt_is_continued(service: Service) -> None:
    service.script("hello", " world, the dog sleeps")
    response = await service.complete("hello", max_tokens=30)
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"] == f"cmpl-{response.headers['x-request-id']}"
    (choice,) = answer["choices"]
    assert choice["text"] == " world, the dog sleeps"
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)


async def test_sixteen_tokens_are_the_default(service: Service) -> None:
    response = await service.complete("hello")
    assert response.json()["usage"]["completion_tokens"] == 16
    assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_usage_counts_tokens_and_cached_tokens(service: Service) -> None:
    prompt = list(range(10, 50))
    first = (await service.complete(prompt, max_tokens=5)).json()["usage"]
    assert first == {
        "prompt_tokens": 40,
        "completion_tokens": 5,
        "total_tokens": 45,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    again = (await service.complete(prompt, max_tokens=5)).json()["usage"]
    assert again["prompt_tokens_details"] == {"cached_tokens": 32}


async def test_a_stream_carries_the_same_text_and_ends_with_done(service: Service) -> None:
    service.script("hello", " world, the dog sleeps")
    response = await service.complete("hello", max_tokens=30, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " world, the dog sleeps"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_ends_a_stream_on_request(service: Service) -> None:
    prompt = list(range(10, 50))
    response = await service.complete(prompt, stream=True, max_tokens=3, stream_options={"include_usage": True})
    *chunks, last, done = events(response.text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}  # blocks of a hand-off do not count as cached
    assert done == "[DONE]"


async def test_usage_grows_chunk_by_chunk_on_request(service: Service) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    service.script("hello", " the dog the fox", end=False)
    response = await service.complete("hello", stream=True, max_tokens=4, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(response.text)[:-1]]
    assert counts == [1, 2, 3, 4, 4]


async def test_prompts_may_be_text_or_tokens_one_or_many(service: Service) -> None:
    first, second = (service.tokenizer.encode(text) for text in ("hello", "the name"))

    async def texts(prompt: Any) -> list[str]:
        response = await service.complete(prompt, seed=5, max_tokens=6)
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["text"] for choice in choices]

    (alone,) = await texts("hello")
    assert await texts(first) == [alone]
    both = await texts(["hello", "the name"])
    assert both[0] == alone
    assert await texts([first, second]) == both
    assert len(set(both)) == 2


async def test_choices_of_each_prompt_follow_each_other_and_differ_by_seed(service: Service) -> None:
    response = await service.complete(["hello", "the name"], n=3, seed=7, max_tokens=8)
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert len(set(texts)) == 6
    shifted = await service.complete("hello", n=2, seed=8, max_tokens=8)
    assert [choice["text"] for choice in shifted.json()["choices"]] == texts[1:3]
    assert response.json()["usage"]["prompt_tokens"] == sum(
        len(service.tokenizer.encode(p)) for p in ("hello", "the name")
    )
    assert response.json()["usage"]["completion_tokens"] == 48


async def test_streamed_choices_are_distinguished_by_their_index(service: Service) -> None:
    whole = await service.complete("hello", n=3, seed=7, max_tokens=8)
    response = await service.complete("hello", n=3, seed=7, max_tokens=8, stream=True)
    texts = ["", "", ""]
    for chunk in events(response.text)[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole.json()["choices"]]


async def test_a_seed_repeats_an_answer_and_no_seed_does_not(service: Service) -> None:
    async def text(**fields: Any) -> str:
        return (await service.complete("hello", max_tokens=12, **fields)).json()["choices"][0]["text"]

    assert await text(seed=3) == await text(seed=3)
    assert await text(seed=-(2**63)) == await text(seed=-(2**63)), "OpenAI's seeds may be negative"
    assert await text() != await text()
    assert await text(seed=-1) != await text(seed=-1), "-1 must mean no seed, as in vLLM"


async def test_a_stop_string_ends_the_text_before_it_across_token_borders(service: Service) -> None:
    service.script("hello", " there, the lazy dog sleeps and runs")
    response = await service.complete("hello", max_tokens=40, stop=["zz", "azy do"])
    (choice,) = response.json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" there, the l", "stop", "azy do")
    await service.cluster.settled()  # returns only if the engine was told to stop


async def test_no_part_of_a_stop_string_is_ever_streamed(service: Service) -> None:
    service.script("hello", " there, the lazy dog sleeps")
    response = await service.complete("hello", max_tokens=40, stop="azy do", stream=True)
    chunks = events(response.text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " there, the l"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_an_incomplete_stop_string_at_the_end_is_part_of_the_text(service: Service) -> None:
    service.script("hello", " the dog")
    response = await service.complete("hello", max_tokens=40, stop=["dogma"])
    assert response.json()["choices"][0]["text"] == " the dog"


async def test_the_stop_string_can_be_kept(service: Service) -> None:
    service.script("hello", " there, the lazy dog sleeps")
    response = await service.complete("hello", max_tokens=40, stop=["lazy"], include_stop_str_in_output=True)
    assert response.json()["choices"][0]["text"] == " there, the lazy"


async def test_stop_strings_wait_for_min_tokens(service: Service) -> None:
    service.script("hello", [*service.tokenizer.encode(" dog dog dog"), *service.tokenizer.encode(" dog")])
    response = await service.complete("hello", max_tokens=40, stop=[" dog"], min_tokens=2)
    assert response.json()["choices"][0]["text"] == " dog dog"


async def test_a_stop_token_ends_the_text_and_is_named(service: Service) -> None:
    (dog,) = service.tokenizer.encode(" dog")
    service.script("hello", " the dog sleeps")
    response = await service.complete("hello", max_tokens=40, stop_token_ids=[dog])
    (choice,) = response.json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" the", "stop", dog)


async def test_characters_split_over_tokens_are_never_broken_in_a_stream(service: Service) -> None:
    text = " the 🦊 jumps — ünïcödé 狐"
    assert len(service.tokenizer.encode("🦊")) > 1
    service.script("hello", text)
    response = await service.complete("hello", max_tokens=60, stream=True)
    pieces = [chunk["choices"][0]["text"] for chunk in events(response.text)[:-1]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


async def test_log_probabilities_have_the_bytes_of_partial_characters(service: Service) -> None:
    fox = service.tokenizer.encode("🦊")
    shown = ["".join(f"\\x{byte:02x}" for byte in service.tokenizer.token_bytes(token)) for token in fox]
    scored = (await service.complete("a🦊", max_tokens=1, prompt_logprobs=0)).json()["choices"][0]["prompt_logprobs"]
    assert [each["decoded_token"] for entry in scored[-len(fox) :] for each in entry.values()] == shown
    service.script_chat("hello", "🦊")
    answer = await service.chat("hello", max_tokens=20, logprobs=True, top_logprobs=1)
    tokens = answer.json()["choices"][0]["logprobs"]["content"][: len(fox)]
    assert [each["token"] for each in tokens] == shown
    assert bytes(byte for each in tokens for byte in each["bytes"]).decode() == "🦊"
    assert "\ufffd" not in answer.text


async def test_a_character_that_never_ends_becomes_a_replacement_at_the_end(service: Service) -> None:
    service.script("hello", service.tokenizer.encode("🦊")[:2])
    response = await service.complete("hello", max_tokens=60)
    assert response.json()["choices"][0]["text"] == "\ufffd"


async def test_echo_puts_the_prompt_before_the_answer(service: Service) -> None:
    service.script("hello", " world")
    whole = await service.complete("hello", echo=True, max_tokens=9)
    assert whole.json()["choices"][0]["text"] == "hello world"
    stream = await service.complete("hello", echo=True, max_tokens=9, stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in events(stream.text)[:-1]) == "hello world"


async def test_logprobs_name_each_token_and_where_it_begins(service: Service) -> None:
    service.script("hello", " the 🦊 fox")
    response = await service.complete("hello", logprobs=2, max_tokens=30)
    (choice,) = response.json()["choices"]
    logprobs = choice["logprobs"]
    tokens = service.tokenizer.encode(" the 🦊 fox")
    assert len(logprobs["tokens"]) == len(tokens)  # the end token is not part of the text
    assert logprobs["tokens"][0] == " the"
    assert logprobs["tokens"][2:6] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\xa6", "bytes:\\x8a"]
    assert logprobs["text_offset"] == [0, 4, 5, 5, 5, 5, 6]
    assert logprobs["token_logprobs"] == [-0.25] * len(tokens)
    assert all(name in top for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


async def test_a_token_behind_an_incomplete_character_begins_behind_its_replacement(service: Service) -> None:
    fox, end = service.tokenizer.encode("🦊"), service.tokenizer.encode(" the fox")
    service.script("hello", [*fox[:2], *end, *fox])
    (choice,) = (await service.complete("hello", logprobs=0, max_tokens=30)).json()["choices"]
    assert choice["text"] == "� the fox🦊"
    assert choice["logprobs"]["tokens"][2:4] == [" the", " fox"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 5, 9, 9, 9, 9]


async def test_streamed_logprobs_are_those_of_the_whole_answer(service: Service) -> None:
    service.script("hello", " the 🦊 fox sleeps there")
    fields = {"logprobs": 1, "max_tokens": 30, "stop": "eeps"}
    whole = (await service.complete("hello", **fields)).json()["choices"][0]["logprobs"]
    streamed: dict[str, list[Any]] = {name: [] for name in whole}
    for chunk in events((await service.complete("hello", **fields, stream=True)).text)[:-1]:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[name] += values
    assert streamed == whole


async def test_tokens_that_a_stop_string_removes_have_no_logprobs(service: Service) -> None:
    service.script("hello", " the dog the fox")
    response = await service.complete("hello", logprobs=0, max_tokens=30, stop=" the fox")
    assert response.json()["choices"][0]["logprobs"]["tokens"] == [" the", " dog"]


async def test_echo_with_logprobs_covers_the_prompt(service: Service) -> None:
    service.script("hello world", " the dog")
    response = await service.complete("hello world", echo=True, logprobs=1, max_tokens=9)
    (choice,) = response.json()["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "hello world the dog"
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value == -0.25 for value in logprobs["token_logprobs"][1:])
    offsets = [sum(map(len, logprobs["tokens"][:index])) for index in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == offsets
    assert "prompt_logprobs" not in choice


async def test_an_echoed_prompt_of_special_tokens_alone_is_scored_too(service: Service) -> None:
    """Evaluations need one entry for each token, although the prompt has no visible text."""
    eos = service.tokenizer.eos_token_id
    response = await service.complete([eos, eos, eos], echo=True, logprobs=1, max_tokens=0)
    (choice,) = response.json()["choices"]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == ["<|im_end|>"] * 3
    assert choice["logprobs"]["text_offset"] == [0, 0, 0]


async def test_a_prompt_can_be_scored_without_generating(service: Service) -> None:
    response = await service.complete("hello world", echo=True, logprobs=1, max_tokens=0)
    (choice,) = response.json()["choices"]
    assert choice["text"] == "hello world"
    assert "".join(choice["logprobs"]["tokens"]) == "hello world"
    assert choice["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_are_keyed_by_token_id(service: Service) -> None:
    tokens = service.tokenizer.encode("hello world")
    response = await service.complete("hello world", prompt_logprobs=2, max_tokens=2)
    entries = response.json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert [next(iter(entry)) for entry in entries[1:]] == [str(token) for token in tokens[1:]]
    assert entries[1][str(tokens[1])] == {
        "logprob": -0.25,
        "rank": 1,
        "decoded_token": service.tokenizer.token_text(tokens[1]),
    }


async def test_sampling_reaches_the_engine_as_given(service: Service) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "min_tokens": 1,
        "ignore_eos": True,
        "logit_bias": {"5": -100, "6": 1.5},
        "allowed_token_ids": [5, 6, 7],
        "stop_token_ids": [9],
        "max_tokens": 3,
    }
    await service.complete("hello", **fields, bad_words=["fox"], priority=2, cache_salt="mine", seed=11)
    for engine in service.cluster.members:
        (request,) = engine.submitted
        sent = request.sampling
        expected = {**fields, "logit_bias": {5: -100.0, 6: 1.5}}
        assert {name: getattr(sent, name) for name in expected} == expected
        assert service.tokenizer.encode("fox") in sent.bad_words_token_ids
        assert (request.seed, request.priority, request.cache_salt) == (11, 2, "mine")
