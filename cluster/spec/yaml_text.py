"""YAML as people write it by hand: what its readers let pass in silence is refused."""

from __future__ import annotations

from typing import Any

import yaml

from .strict import InvalidSpec


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice: others take the last, so the first is lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Raises `InvalidSpec` with the place."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InvalidSpec(f"is no YAML: {where}{error.problem or error.context}") from None
    except RecursionError:
        raise InvalidSpec("is no YAML that can be read: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # a character that YAML forbids; a date or a number that is none
        raise InvalidSpec(f"is no YAML: {' '.join(str(error).split())}") from None
