"""Guesses made on the device at the end of each step, by the model's draft head or by a draft model.

    read     all tokens of the step ─> KV or states that the drafter keeps of them
    guess    the token drawn last   ─> logits ─> a guess ─> drafter ─> logits ─> the next guess ...

A guess is drawn like the token itself, with the request's temperature and the random numbers of that position. So where
the drafter's logits are close to the model's, the draws are equal. Penalties, biases and grammars are left out.

Nothing here waits for the device, and no shape depends on values in the tables, so a captured step has both parts.

base.py     shared by all: draws of guesses, guesses in rows, caches of their tokens
heads.py    draft heads, which read the hidden states of every step
models.py   draft models, which read tokens when they must
"""

from __future__ import annotations

from .. import DraftModel, StepParts
from .heads import HeadGuesser, LayersGuesser
from .models import ModelGuesser, ReadSize

__all__ = ["HeadGuesser", "ModelGuesser", "ReadSize", "make_guesser"]


def make_guesser(parts: StepParts) -> HeadGuesser | ModelGuesser | None:
    """Return the guesser of a runner; None if nothing guesses on the device."""
    if not parts.limits.guesses_on_device:
        return None
    groups, model, head = parts.draft_model or DraftModel(parts.inputs.arenas.model_groups, head=parts.model)
    if head is not None:
        return (HeadGuesser if head.num_draft_layers == 1 else LayersGuesser)(parts, groups, head)
    assert model is not None, "a draft model is a model or a head"
    return ModelGuesser(parts, groups, model)
