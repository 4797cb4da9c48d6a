"""Small tokenizers of the kinds that models have, trained when a test needs them."""

from __future__ import annotations

import json

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. She said: hello, world!",
    "def push(self, token_ids): return [token for token in token_ids if token]",
    "Grüße aus Köln, çà et là, ζωή, привет, 你好世界, こんにちは, 안녕하세요, שלום",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 thumbs 🇩🇪 e\u0301 combining",
] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentence_piece_backend() -> Backend:
    """Return a tokenizer like Llama 2's: a marker before each word, bytes for unknown characters, BOS before a text."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<unk>", *SPECIAL, *pieces], limit_alphabet=60, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    state = Backend.from_str(_bytes_not_special(backend.to_str(), pieces))
    state.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bos = state.token_to_id("<s>")
    state.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return state


def metaspace_backend() -> Backend:
    """Return a tokenizer like T5's: the decoder drops the marker of the first token."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def word_piece_backend() -> Backend:
    """Return a tokenizer whose decoder needs more than one token at a time."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def unusual_backend() -> Backend:
    """Return a byte-level tokenizer with a decoder of several steps, which counts as one that needs several tokens."""
    backend = byte_level_backend()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def _bytes_not_special(serialized: str, pieces: list[str]) -> str:
    """Make byte pieces ordinary entries of the vocabulary: decoders would skip them if they were special."""
    state = json.loads(serialized)
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in pieces]
    return json.dumps(state)


BACKENDS = {
    "byte level": byte_level_backend,
    "sentence piece": sentence_piece_backend,
    "metaspace": metaspace_backend,
    "word piece": word_piece_backend,
    "unusual": unusual_backend,
}
