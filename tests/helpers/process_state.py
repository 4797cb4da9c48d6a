"""Process-wide state that tests share: a test that leaves it changed affects the outcome of later ones."""

from __future__ import annotations

import functools
import gc
import logging
import operator
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

LOGGERS = ("baton", "ray.serve", "ray.autoscaler")  # with the loggers below them, and the root logger
# Without SIGINT: event loops and servers within them set it in turn, and restore what they found.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
# Set by pytest; by torch when it compiles something or first uses a GPU; by Ray, and by scikit-learn, which
# `transformers` imports where it is installed, when they are imported.
OTHERS_VARIABLES = ("PYTEST_", "TORCH", "TRITON_CACHE_DIR", "CUDA_MODULE_LOADING", "RAY_CLIENT_MODE", "KMP_")
IMPORTED = ("torch.", "logs.")  # settings that exist once their module is imported
SEED = 0
NOTHING = "nothing"


def seed_randomness() -> None:
    """Seed all random generators, so that a test draws the same numbers whatever tests ran before it."""
    random.seed(SEED)
    if numpy := _imported("numpy"):
        numpy.random.seed(SEED)
    if torch := _imported("torch"):
        torch.default_generator.manual_seed(SEED)  # `torch.manual_seed` records its caller, for other devices
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(SEED)


def process_state() -> dict[str, object]:
    """Return the settings of this process that a test could leave changed, by name."""
    state: dict[str, object] = {
        "os.getcwd()": os.getcwd(),
        "sys.getswitchinterval()": sys.getswitchinterval(),
        "gc.isenabled()": gc.isenabled(),
        "socket.getdefaulttimeout()": socket.getdefaulttimeout(),
        "logging.disable": logging.root.manager.disable,
    }
    state |= {
        f"os.environ[{name!r}]": value for name, value in os.environ.items() if not name.startswith(OTHERS_VARIABLES)
    }
    state |= {f"handler of {number.name}": signal.getsignal(number) for number in SIGNALS}
    state |= {f"logger {name!r}": settings for name, settings in _changed_loggers().items()}
    if logs := _imported("baton.cluster.logs"):
        state["logs.request_id"] = logs.request_id.get()
    if torch := _imported("torch"):
        state["torch.get_num_threads()"] = torch.get_num_threads()
        state["torch.get_default_dtype()"] = torch.get_default_dtype()
        state["torch.is_grad_enabled()"] = torch.is_grad_enabled()
        state["torch.is_inference_mode_enabled()"] = torch.is_inference_mode_enabled()
        state["torch.are_deterministic_algorithms_enabled()"] = torch.are_deterministic_algorithms_enabled()
    return state


def module_state() -> dict[str, dict[str, object]]:
    """Return the objects to which the names in each of Baton's modules refer."""
    return {name: vars(module).copy() for name, module in list(sys.modules.items()) if name.startswith("baton.")}


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return a line for each setting whose value has changed."""
    if before == after:
        return []
    imported = [name for name in after if name not in before and name.startswith(IMPORTED)]
    names = [name for name in {**before, **after} if before.get(name, NOTHING) != after.get(name, NOTHING)]
    names = [name for name in names if name not in imported]
    return [f"{name} was {before.get(name, NOTHING)} and is {after.get(name, NOTHING)}" for name in names]


def replaced_names(before: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return a line for each module-level name that refers to another object now: `monkeypatch` would restore it."""
    found = []
    for module, names in before.items():
        now = vars(sys.modules[module]) if module in sys.modules else {}
        if not all(
            map(operator.is_, map(now.get, names), names.values())
        ):  # a fast check first: it runs for all modules
            others = [(name, value, now.get(name, NOTHING)) for name, value in names.items()]
            found += [f"{module}.{name} was {was!r:.99} and is {it!r:.99}" for name, was, it in others if it is not was]
    return found


def _imported(name: str) -> Any:
    """Return a module, or None if it is not imported, or another thread is just importing it."""
    module = sys.modules.get(name)
    return None if module is None or getattr(module.__spec__, "_initializing", False) else module


def _changed_loggers() -> dict[str, tuple[Any, ...]]:
    """Return level, handlers (without pytest's), propagation and `disabled` of each logger with non-default ones."""
    found = {}
    for name, logger in _loggers(len(logging.root.manager.loggerDict)):
        if logger.level or logger.handlers or logger.disabled or not logger.propagate:
            handlers = tuple(each for each in logger.handlers if not type(each).__module__.startswith("_pytest"))
            found[name] = (logging.getLevelName(logger.level), handlers, logger.propagate, logger.disabled)
    return found


@functools.lru_cache(1)
def _loggers(num_known: int) -> list[tuple[str, logging.Logger]]:
    """Return the root logger and those below LOGGERS. `num_known`, the number of loggers, is the key of the cache."""
    ours = [
        name for name in logging.root.manager.loggerDict if f"{name}.".startswith(tuple(f"{each}." for each in LOGGERS))
    ]
    return [("root", logging.root), *((name, logging.getLogger(name)) for name in ours)]
