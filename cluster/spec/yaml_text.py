"""A strict reader of YAML written by hand: it refuses mistakes that other readers let pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from .errors import InvalidSpec

MOST_VALUES = 1_000_000  # of a file whose anchors are written out wherever they are used
MOST_LEVELS = 200
TOO_DEEP = "is no YAML that can be read: it is nested too deeply"


@dataclass(frozen=True)
class _Extent:
    """The size of a value with its anchors written out."""

    values: int = 1
    levels: int = 1


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which other readers drop the first in silence.

    It looks at what is written, before anchors are merged into it (`<<`): keys that replace merged ones are no mistake.
    """

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


def read_yaml(text: str) -> Any:
    """Parse a text of YAML. Raises `InvalidSpec` with the place."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_extent(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InvalidSpec(f"is no YAML: {where}{error.problem or error.context}") from None
    except RecursionError:
        raise InvalidSpec(TOO_DEEP) from None
    except (yaml.YAMLError, ValueError) as error:  # a character that YAML forbids; a date or a number that is none
        if isinstance(error, InvalidSpec):
            raise
        raise InvalidSpec(f"is no YAML: {' '.join(str(error).split())}") from None


def _check_extent(root: yaml.Node) -> None:
    """Refuse anchors that contain themselves, and content that is too large with its anchors written out.

    A few lines of anchors that contain each other many times can stand for more than any memory holds. The check takes
    time in proportion to the text. Raises `InvalidSpec`.
    """
    extents: dict[int, _Extent] = {}
    open_nodes: set[int] = set()

    def extent_of(node: yaml.Node) -> _Extent:
        if id(node) in open_nodes:
            raise InvalidSpec(f"is no YAML that can be read: {_line(node)}: an anchor holds itself")
        if id(node) not in extents:
            open_nodes.add(id(node))
            below = [extent_of(part) for part in _parts(node)]
            open_nodes.remove(id(node))
            values = 1 + sum(part.values for part in below)
            levels = 1 + max((part.levels for part in below), default=0)
            if values > MOST_VALUES:
                raise InvalidSpec(
                    f"is no YAML that can be read: {_line(node)}: its anchors stand for more than {MOST_VALUES} values"
                )
            if levels > MOST_LEVELS:
                raise InvalidSpec(TOO_DEEP)
            extents[id(node)] = _Extent(values, levels)
        return extents[id(node)]

    extent_of(root)


def _parts(node: yaml.Node) -> list[yaml.Node]:
    match node:
        case yaml.MappingNode():
            return [part for pair in node.value for part in pair]
        case yaml.SequenceNode():
            return list(node.value)
    return []


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"
