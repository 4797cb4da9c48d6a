"""The progress bar of `LLM.generate`: finished prompts, and the rates of prompt and output tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .completion import RequestOutput

if TYPE_CHECKING:
    from rich.progress import Progress

UPDATE_S = 0.1


class PromptsBar:
    """Counts every token, but updates the bar only a few times a second: an update is slow."""

    def __init__(self, progress: Progress, num_prompts: int) -> None:
        self._progress = progress
        self._num_prompts = num_prompts
        self._task = progress.add_task("prompts", total=num_prompts, speed="")
        self._start = self._told = time.perf_counter()
        self._tokens_in = self._tokens_out = self._finished = 0

    def advance(self, num_tokens: int, output: RequestOutput) -> None:
        """Count `num_tokens` more tokens of a prompt's output."""
        self._tokens_out += num_tokens
        if output.finished:
            self._finished += 1
            self._tokens_in += len(output.prompt_token_ids)
        now = time.perf_counter()
        if now - self._told < UPDATE_S and self._finished < self._num_prompts:
            return
        self._told, elapsed = now, now - self._start
        speed = f"{self._tokens_in / elapsed:.0f} tokens/s in, {self._tokens_out / elapsed:.0f} out"
        self._progress.update(self._task, completed=self._finished, speed=speed)


@contextmanager
def prompts_bar(num_prompts: int) -> Iterator[PromptsBar]:
    """Draw the bar on stderr while the context is open."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield PromptsBar(progress, num_prompts)
