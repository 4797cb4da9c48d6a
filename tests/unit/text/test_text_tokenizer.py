from __future__ import annotations

import base64
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from baton.engine.text import Tokenizer, TokenizerError, bad_word_token_ids

from .small_tokenizers import BACKENDS, NAMED


def write_folder(folder: Path, kind: str = "byte level", **config: Any) -> Path:
    BACKENDS[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**NAMED, **config}))
    return folder


def test_a_folder_gives_the_same_tokenizer_as_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for kind in BACKENDS:
        folder = tmp_path / kind
        folder.mkdir()
        write_folder(folder, kind, tokenizer_class="PreTrainedTokenizerFast", add_bos_token=True)
        ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
        for text in ("hello world", "", " <|im_start|>Grüße 👍🏽</s>"):
            assert ours.encode(text) == theirs.encode(text)
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
        assert ours.vocab_size == len(theirs)


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = BACKENDS["byte level"]()
    backend.enable_truncation(4)
    backend.enable_padding(length=4, pad_token="<s>")
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a rather long sentence")) == "a rather long sentence"
    assert len(tokenizer.encode("a")) == 1


def test_named_special_tokens_are_special_even_if_the_vocabulary_does_not_say_so(tmp_path: Path) -> None:
    write_folder(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in state["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_token_ids == {tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert tokenizer.decode(tokenizer.encode("a</s>")) == "a"


def test_special_tokens_may_be_objects_and_may_be_in_a_separate_file(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.token(tokenizer.eos_token_id or 0) == "<|im_end|>"
    assert tokenizer.bos_token_id is None


def test_vocabularies_of_tiktoken_are_read_and_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    """As Kimi Linear is published: without a tokenizer.json, and with ids of added tokens that are not used."""
    pieces = [*(bytes([byte]) for byte in range(256)), b"he", b"ll", b"hell", b"hello"]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    added = {"260": {"content": "[EOS]", "special": True}, "263": {"content": "<|im_end|>", "special": True}}
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    described = {"tokenizer_class": "TikTokenTokenizer", "auto_map": code, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**described, "eos_token": "[EOS]"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_linear"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_id == 260
    assert tokenizer.encode("hello!<|im_end|>") == [259, ord("!"), 263]
    assert tokenizer.decode([*"Grüße".encode(), 263]) == "Grüße"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "holds no tokenizer.json"),
        (
            {"config.json": '{"model_type": "llama", "hidden_size": "big"}'},
            "nothing to convert to one: .*'hidden_size'",
        ),
        ({"tokenizer.json": "{}"}, "cannot be read|can be read"),
        ({"tokenizer_config.json": "{"}, "is not JSON"),
        ({"tokenizer_config.json": "[]"}, "must hold an object"),
        ({"tokenizer_config.json": '{"eos_token": 7}'}, "eos_token must be a string"),
    ],
)
def test_errors_name_the_fault_of_a_folder(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=reason):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nowhere is not a folder; .*, or a name on the Hub"):
        Tokenizer.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["byte level", "sentence piece"])
@settings(deadline=None, max_examples=100)
@given(text=st.text())
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    data = b"".join(tokenizer.token_bytes(token) for token in tokens)
    assert (data.removeprefix(b" ") if kind == "sentence piece" else data) == text.encode()


def test_a_part_of_a_character_is_shown_by_its_bytes(byte_level: Tokenizer) -> None:
    first, *_ = byte_level.encode("𝔘")
    piece = byte_level.token_bytes(first)
    assert piece in ("𝔘".encode()[:n] for n in (1, 2, 3))
    assert byte_level.token_text(first) == "".join(f"\\x{byte:02x}" for byte in piece)
    assert byte_level.token_bytes(byte_level.vocab_size) == b""


def test_threads_may_share_a_tokenizer(byte_level: Tokenizer) -> None:
    texts = [f"hello world number {i} 👍🏽" for i in range(200)]
    expected = [byte_level.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(byte_level.encode, texts)) == expected


def test_bad_words_are_banned_at_the_start_of_a_text_and_after_a_space(byte_level: Tokenizer) -> None:
    alone, spaced = (byte_level.encode(text) for text in ("fox", " fox"))
    assert alone[-1] != spaced[-1]
    assert bad_word_token_ids(byte_level, ["fox"]) == [alone, spaced]
    assert bad_word_token_ids(byte_level, [" fox"]) == [alone, spaced]


def test_a_sequence_that_ends_with_a_banned_one_is_not_listed_again(byte_level: Tokenizer) -> None:
    assert byte_level.encode(" zq")[-2:] == byte_level.encode("zq")
    assert bad_word_token_ids(byte_level, ["zq", "zq", ""]) == [byte_level.encode("zq")]


def test_a_gateway_loads_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, baton.engine.text as _; sys.exit(not {'torch', 'transformers', 'numpy'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


COMPOSING = "\u03b1\u0313\u0300\u0345"  # four characters, of which composition makes one


@pytest.mark.parametrize("kind", BACKENDS)
@given(text=st.text() | st.text(alphabet="a é한" + COMPOSING).map(lambda text: 20 * text))
def test_a_text_has_no_fewer_tokens_than_the_bound_of_its_length(
    kind: str, tokenizers: dict[str, Tokenizer], text: str
) -> None:
    tokenizer = tokenizers[kind]
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_composed_characters_have_no_fewer_tokens_than_the_bound() -> None:
    backend = BACKENDS["byte level"]()
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend, NAMED)
    text = COMPOSING * 100
    assert 0 < tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    backend.normalizer = normalizers.Replace("a", "")
    assert Tokenizer(backend, NAMED).least_tokens(text) == 0, "this normalizer could remove any text"


@pytest.mark.parametrize(("side", "text"), [("lstrip", " " * 10_000 + "<turn>"), ("rstrip", "<turn>" + " " * 10_000)])
def test_whitespace_that_a_token_strips_does_not_count(side: str, text: str) -> None:
    backend = BACKENDS["byte level"]()
    backend.add_special_tokens([AddedToken("<turn>", **{side: True})])
    tokenizer = Tokenizer(backend, NAMED)
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)) == 1


def test_a_long_text_has_many_tokens(byte_level: Tokenizer) -> None:
    assert byte_level.least_tokens("fox " * 100_000) > 4_000
