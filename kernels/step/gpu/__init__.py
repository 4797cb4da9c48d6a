"""Kernels around the model in Triton. They are small, so they must be few and never wait for the CPU."""

from .draws import accept_again, accept_tokens, place_drafts, replace_tokens, store_tokens
from .inputs import apply_writes, chunk_inputs, decode_inputs, decode_states, replay_states

__all__ = [
    "accept_again",
    "accept_tokens",
    "apply_writes",
    "chunk_inputs",
    "decode_inputs",
    "decode_states",
    "place_drafts",
    "replace_tokens",
    "replay_states",
    "store_tokens",
]
