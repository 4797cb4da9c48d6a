"""A change that a test leaves behind is named."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from baton.cluster import pluralize

from ..helpers.process_state import changes, module_state, process_state, replaced_names, seed_randomness


def test_nothing_is_named_where_nothing_has_changed() -> None:
    assert changes(process_state(), process_state()) == []
    assert replaced_names(module_state()) == []


def test_a_variable_a_level_a_handler_and_a_number_of_threads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, handler, num_threads = logging.getLogger("baton.tests.own"), logging.NullHandler(), torch.get_num_threads()
    before = process_state()
    monkeypatch.setenv("LEFT_BY_A_TEST", "1")
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    torch.set_num_threads(num_threads + 1)
    try:
        assert sorted(changes(before, process_state())) == [
            f"logger 'baton.tests.own' was nothing and is ('DEBUG', ({handler},), True, False)",
            "os.environ['LEFT_BY_A_TEST'] was nothing and is 1",
            f"torch.get_num_threads() was {num_threads} and is {num_threads + 1}",
        ]
    finally:
        torch.set_num_threads(num_threads)
        logger.removeHandler(handler)
        logger.setLevel("NOTSET")


def test_a_name_that_stands_for_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = module_state()
    monkeypatch.setattr(pluralize, "__doc__", "another")
    (line,) = replaced_names(before)
    assert line.startswith("baton.cluster.pluralize.__doc__ was ")
    assert line.endswith(" and is 'another'")


def test_each_test_draws_the_same_numbers() -> None:
    drawn = []
    for _ in range(2):
        seed_randomness()
        drawn.append((random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
