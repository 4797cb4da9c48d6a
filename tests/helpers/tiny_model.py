"""A model that consists of a tokenizer and a name only."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.cluster.gateway.model import ServedModel
from baton.engine.text import ChatTemplate, Tokenizer

MAX_MODEL_LEN = 256
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ hint if hint is defined else '' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps",
    "a relay team passes the baton from one runner to the next runner",
    "hello world, hello there, what is the name of the fox?",
]


def tiny_tokenizer() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, {"eos_token": "<|im_end|>"}, ChatTemplate({"default": TEMPLATE}))


def tiny_model(tokenizer: Tokenizer, max_model_len: int = MAX_MODEL_LEN) -> ServedModel:
    return ServedModel(
        model_id="tiny",
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(tokenizer.eos_token_id,),
    )
