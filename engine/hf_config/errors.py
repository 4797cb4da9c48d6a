"""Errors about a model's folder. All of them are raised before the first weight is read."""

from __future__ import annotations

from collections.abc import Iterable


class ModelError(ValueError):
    """A model cannot be served as its folder or the arguments describe it."""


class InvalidModelConfig(ModelError):
    """A file of the checkpoint is missing, broken or contradicts itself."""


class UnsupportedModel(ModelError):
    """The checkpoint needs something that this version does not support."""


class UnsupportedArchitecture(UnsupportedModel):
    """No model file exists for any of the architectures that config.json names."""

    def __init__(self, given: Iterable[str], supported: Iterable[str]) -> None:
        given = list(given)
        multimodal = any(name.endswith("ForConditionalGeneration") for name in given)
        why = " (only the text of the models that are named here is served, no image or sound)" if multimodal else ""
        super().__init__(
            f"config.json: architectures {given} are not supported{why}; supported are {', '.join(sorted(supported))}"
        )


class MaxModelLenTooLong(ModelError):
    """More positions were requested than the model has."""

    def __init__(self, given: int, limit: int) -> None:
        super().__init__(
            f"max_model_len is {given}, but the model has {limit} positions; lower max_model_len, or give the "
            "checkpoint a rope scaling that extends them (rope_parameters in config.json)"
        )


class ModelNotFetched(ModelError):
    """A model of the Hub is not on this machine, and could not be fetched."""


class HubUnreachable(ModelNotFetched):
    """The Hub did not answer: fetching may succeed later, or from another network."""


class WeightsError(ModelError):
    """A checkpoint's tensors are not exactly the model's parameters."""
