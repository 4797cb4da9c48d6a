"""Reasoning: its effort, as chat templates understand it, and thoughts that travel in a signature."""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Any, Literal

from ..errors import bad_request

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # OpenAI's values

EFFORT = "reasoning_effort"
SEAL = "baton1."  # prefix of signatures that hold thoughts
THINKS = ("enable_thinking", "thinking")  # template variables that switch reasoning on and off


def effort_variables(effort: Effort | None, known: Collection[str]) -> dict[str, Any]:
    """Return the template variables for a reasoning effort; `known` are the variables that the template reads.

    Raises `ApiError` (400) for an effort that the template would ignore. `none` is always accepted for a model that
    does not reason.
    """
    if effort is None:
        return {}
    if EFFORT in known:
        return {EFFORT: effort}
    if effort == "none":
        return {name: False for name in THINKS if name in known}
    told = "whether it thinks at all" if any(name in known for name in THINKS) else "nothing of it"
    message = f"{EFFORT!r} {effort!r} is not supported with this model: its chat template can be told {told}."
    raise bad_request(EFFORT, message, "unsupported_parameter")


def sealed_thoughts(text: str) -> str:
    """Return a signature that holds thoughts whose text is omitted, so that the client can send them back.

    The encoding hides thoughts from display, not from the client. Clients must not decode it: its form may change.
    """
    return SEAL + base64.urlsafe_b64encode(text.encode()).decode()


def opened_thoughts(signature: str) -> str | None:
    """Return the thoughts in a signature; None if it holds none. Raises `ValueError` if it is damaged."""
    if not signature.startswith(SEAL):
        return None
    return base64.b64decode(signature.removeprefix(SEAL), altchars=b"-_", validate=True).decode()
