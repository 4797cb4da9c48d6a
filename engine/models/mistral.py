"""Mistral 7B and its successors (arXiv:2310.06825)."""

from __future__ import annotations

from baton.engine.layers.decoder import CausalLM


class MistralForCausalLM(CausalLM):
    """The plain decoder without biases. Its sliding window is a value of the config (`layer_windows`)."""
