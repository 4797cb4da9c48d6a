"""Encodes prompts in which a text that spells a control token stays text."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

_PRIVATE_USE = 0xF0000  # plane 15: 65 534 characters without a meaning
_NUM_PRIVATE = 65_534
_SECRET_CHARS = 8  # 128 bits


class GuardedEncoder:
    """A second tokenizer with the same vocabulary, in which control tokens have secret names.

    The names begin with random characters, so that no text holds one by chance or on purpose. Everything else about the
    tokens stays: where they split a text, and which blanks around them they take.
    """

    def __init__(self, backend: Backend, control: Mapping[int, AddedToken], unknown_ids: frozenset[int]) -> None:
        """`control` are the control tokens by their ids. `unknown_ids` stand for text that the vocabulary lacks."""
        self._framing = backend
        self._backend = renamed = Backend(backend.model)  # shares the vocabulary, which may be large
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(backend, part) is not None:
                setattr(renamed, part, getattr(backend, part))
        secret = "".join(chr(_PRIVATE_USE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(_SECRET_CHARS))
        self.names = {token_id: secret + chr(_PRIVATE_USE + i) for i, token_id in enumerate(control)}
        added = sorted(backend.get_added_tokens_decoder().items())
        renamed.add_tokens([_renamed(token, self.names.get(token_id, token.content)) for token_id, token in added])
        self._original_ids = {
            renamed.token_to_id(self.names.get(token_id, token.content)): token_id for token_id, token in added
        }
        self._never = (control.keys() - unknown_ids) - self._original_ids.keys()
        self._spelled = {token_id: self._spell(control[token_id].content) for token_id in self._never}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text in which control tokens have their secret names."""
        encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        original = self._original_ids
        if self._never.isdisjoint(encoded):
            ids = [original.get(token_id, token_id) for token_id in encoded]
        else:
            ids = [i for token_id in encoded for i in self._spelled.get(token_id, [original.get(token_id, token_id)])]
        return self._framed(ids) if add_special_tokens else ids

    def _spell(self, content: str) -> list[int]:
        """Return token ids of single characters, for texts that the model itself would merge into a control token."""
        tokens = [token for character in content for token in self._backend.model.tokenize(character)]
        return [token.id for token in tokens if token.id not in self._never]

    def _framed(self, ids: list[int]) -> list[int]:
        """Add the tokens that frame every text."""
        frame = self._framing.encode("a", add_special_tokens=True)
        text = [i for i, is_frame in enumerate(frame.special_tokens_mask) if not is_frame]
        return [*frame.ids[: text[0]], *ids, *frame.ids[text[-1] + 1 :]]


def _renamed(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=token.single_word and name == token.content,  # the caller has checked for word boundaries
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
