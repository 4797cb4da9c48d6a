"""Errors between the members of a group."""

from __future__ import annotations


class GroupFailed(RuntimeError):
    """A member of the group has gone or failed, so that none of them can go on."""


class CollectiveFailed(GroupFailed):
    """The others did not do their part of a collective: why is known to whoever knows what has become of them."""
