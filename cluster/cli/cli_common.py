"""Options, errors and output that several commands share.

Output that is redrawn (`watch`) stays in place in a terminal; in a pipe or a file, each drawing follows the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import reprlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, get_type_hints
from urllib.parse import urlsplit

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

EXIT_USAGE = 2
WIDE = 10_000  # columns: nothing is cut or wrapped
DEFAULT_URL = "http://127.0.0.1:8000"


def http_url(given: str) -> str:
    """Return the checked URL of a server; `localhost:8000` becomes `http://localhost:8000`."""
    url = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, or an unclosed bracket
        is_one = False
    if not is_one:
        raise typer.BadParameter(f"{given!r} is not the URL of a server: give one such as {DEFAULT_URL}")
    return url


class CommandGroup(TyperGroup):
    """A group of commands whose help shows the whole first sentence of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, self.commands[name].get_short_help_str(limit=WIDE)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


# Without rich: its boxes would cut the names of options in a terminal of 80 columns.
new_group = functools.partial(typer.Typer, cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None)

Url = Annotated[str, typer.Option("--url", "--base-url", callback=http_url, help="URL of a gateway.")]
ApiKey = Annotated[str | None, typer.Option(help="API key, if the gateway requires one.")]


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer see the fields of a command's dataclass parameters as options. The command itself gets the objects.

    @app.command()
    @flat
    def plan(options: PlanOptions) -> None: ...
    """
    hints = get_type_hints(command, include_extras=True)
    tables: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {}
        for name, table in tables.items():
            made[name] = table(**{field.name: given.pop(field.name) for field in dataclasses.fields(table)})
        command(**made, **given)

    parameters = list(_parameters(command, hints))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _parameters(command: Callable[..., None], hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield a command's parameters as typer is to see them: each dataclass is replaced by its fields."""
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not dataclasses.is_dataclass(hint):
            yield parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hint)
            continue
        types = get_type_hints(hint, include_extras=True)
        for field in dataclasses.fields(hint):
            default = parameter.empty if field.default is dataclasses.MISSING else field.default
            yield inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=default, annotation=types[field.name])


def print_error(message: str) -> None:
    """Print an error to stderr, since a program may read stdout."""
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)


def fail(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """End the command with an error message."""
    print_error(message)
    raise SystemExit(code)


def stdout_console() -> Console:
    """Return a console on stdout. If stdout is a pipe or a file, nothing is cut or wrapped."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=WIDE)


def in_a_folder(file: Path | None) -> Path | None:
    """Check the path of a file to write, and return it. Raises `typer.BadParameter` if it cannot be written."""
    if file is not None:
        folder = file.absolute().parent
        if not folder.is_dir():
            raise typer.BadParameter(f"the folder {folder} does not exist")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise typer.BadParameter(f"{file.absolute()} cannot be written by this user")
    return file


def write_file(file: Path, text: str) -> None:
    """Write a file, or end the command with an error message."""
    try:
        file.write_text(text)
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}", code=1)


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, callback=in_a_folder, help="Also write the result to this file, as JSON."),
]


ENGINE_ARGS = {"allow_extra_args": True, "ignore_unknown_options": True}  # of commands of the next class


class EngineCommand(TyperCommand):
    """A command that takes engine arguments as options, too, before and after its model and its own options.

    vLLM's short options of parallel ranks stand for the long ones. Its `context.args` are words for `engine_args_from`.
    """

    SHORT: ClassVar[Mapping[str, str]] = {
        "-tp": "--tensor-parallel-size",
        "-dp": "--data-parallel-size",
        "-ep": "--enable-expert-parallel",
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options: list[Any] = self.get_params(ctx)
        has_value = {name: not each.is_flag for each in options for name in _names(each)}
        own: list[str] = []
        of_engine: list[str] = []
        rest = list(args)
        while rest and rest[0] != "--":
            word = rest.pop(0)
            name, is_whole, value = word.partition("=")
            if name in self.SHORT:
                name = f"-{name}" if f"-{name}" in has_value else self.SHORT[name]
            word = f"{name}{is_whole}{value}"
            is_own = name in has_value or not word.startswith("--")
            taken = own if is_own else of_engine
            taken.append(word)
            if rest and not is_whole and (has_value.get(name) if is_own else _is_value(rest[0], name)):
                taken.append(rest.pop(0))
        unexpected = super().parse_args(ctx, [*own, *rest])
        ctx.args = [*unexpected, *of_engine]
        return list(ctx.args)


def _names(parameter: Any) -> list[str]:
    is_option = parameter.param_type_name == "option"
    return [*parameter.opts, *parameter.secondary_opts] if is_option else []


def _is_value(word: str, option: str) -> bool:
    """Return whether a word that follows an engine argument is its value; one that is true or false needs none."""
    from baton.engine.config import EngineArguments
    from baton.engine.vllm_compat import ENGINE

    name = option.removeprefix("--").replace("-", "_").removeprefix("no_")
    field = EngineArguments.model_fields.get(name)
    is_switch = field is not None and field.annotation in (bool, bool | None)
    is_switch |= name in ENGINE and ENGINE[name].is_switch
    return word.lower() in ("true", "false") if is_switch else not word.startswith("--")


def engine_args_from(words: list[str]) -> dict[str, Any]:
    """Parse `--max-num-seqs 128 --no-enable-prefix-caching --device=cpu` into names and values."""
    import yaml

    args: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            fail(f"unexpected argument {word!r}; engine arguments look like --max-num-seqs 128")
        name, has_value, value = word[2:].partition("=")
        if not has_value and rest and not rest[0].startswith("--"):
            value, has_value = rest.pop(0), "="
        name = name.replace("-", "_")
        if has_value:
            try:
                args[name] = yaml.safe_load(value)
            except (yaml.YAMLError, ValueError, RecursionError):  # or a date or a number that Python cannot hold
                option, shown = word.partition("=")[0], reprlib.repr(value)
                fail(f"{option}: {shown} is not valid YAML; put values with brackets or colons in quotes")
        elif name.startswith("no_"):
            args[name.removeprefix("no_")] = False
        else:
            args[name] = True
    return args


class WidestThatFits:
    """Draws the first of several tables that fits in the terminal, or else the last one; the widest comes first."""

    def __init__(self, *tables: Table) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        whole = options.update(max_width=WIDE)
        fitting = (each for each in self._tables if console.measure(each, options=whole).maximum <= options.max_width)
        yield next(fitting, self._tables[-1])


@dataclass(frozen=True)
class Pace:
    interval_s: float
    iterations: int = 0  # 0: until Ctrl-C


def watch(pace: Pace, draw: Callable[[], RenderableType], *, is_first_drawn: bool = False) -> None:
    """Show what `draw` returns every `interval_s`, until Ctrl-C or for the given number of iterations.

    `is_first_drawn`: the caller has shown the first drawing already; it counts as one iteration and is not repeated.
    """
    from rich.live import Live

    console = stdout_console()
    with contextlib.suppress(KeyboardInterrupt):
        if not console.is_terminal:
            for _ in _times(pace, is_first_drawn):
                console.print(draw(), soft_wrap=True)
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for _ in _times(pace, is_first_drawn):
                live.update(draw(), refresh=True)


def _times(pace: Pace, is_first_drawn: bool) -> Iterator[int]:
    for index in itertools.count() if not pace.iterations else range(pace.iterations):
        if index:
            time.sleep(pace.interval_s)
        if index or not is_first_drawn:
            yield index
