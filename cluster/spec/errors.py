"""The error of settings that cannot work."""

from __future__ import annotations


class InvalidSpec(ValueError):
    """The application cannot work as described. The message has one line a problem: where, what, what to change."""
