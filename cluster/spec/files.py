"""Reads applications from files, finds their models' folders, and checks files for `ray up` by Ray's own rules.

Hand-written YAML is read strictly: mistakes that other readers ignore are refused.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import yaml

from baton.cluster.contracts import LoadBalancing
from baton.engine.hf_config.errors import ModelNotFetched
from baton.engine.hf_config.hub import Files, address_refusal, is_commit, is_hub_name
from baton.engine.strict_model import describe

from .application import FleetSpec
from .deployments import with_deployments
from .parts import InvalidSpec

CHECKOUT = Path(__file__).resolve().parents[2]
IMPORT_PATH = "baton.cluster.app:build_app"
DEFAULT_NAME = "baton"  # of an application if its file gives none
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
WITHIN_A_MACHINE = {  # UCX's names of transports within one machine
    *("self", "sm", "shm", "posix", "sysv", "cma", "knem", "xpmem"),
    *("cuda", "cuda_copy", "cuda_ipc", "gdr_copy"),
}


def load_spec(args: Mapping[str, Any], *, needs_model: bool = True) -> FleetSpec:
    """Check arguments, and return the application that they describe; its `model` and `download_dir` are absolute
    paths.

    If `model` is a name on the Hub, it stays one, and `revision` becomes its present commit, so that all processes load
    the same; for that, config.json and the tokenizer are downloaded. Without `needs_model` nothing is downloaded, and a
    folder need not be on this machine. Raises `InvalidSpec`.
    """
    if not isinstance(args, Mapping):
        raise InvalidSpec(f"the application must be a mapping with `model` and `fleets`, not {type(args).__name__}")
    model = args.get("model")
    is_name = isinstance(model, str) and not has_model(model) and is_hub_name(model)
    if isinstance(model, str) and not is_name and (needs_model or has_model(model) or address_refusal(model)):
        args = {**args, "model": str(find_model_folder(model))}
    if isinstance(folder := args.get("download_dir"), str) and folder:  # other processes have other current folders
        args = {**args, "download_dir": str(Path(folder).expanduser().absolute())}
    try:
        spec = FleetSpec.model_validate(dict(args))
        return _at_commit(spec) if is_name and needs_model and not is_commit(spec.revision) else spec
    except pydantic.ValidationError as error:
        raise InvalidSpec(describe(error, secret="api_keys")) from None
    except ModelNotFetched as error:
        raise InvalidSpec(f"model: {error}") from error


def with_model(args: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the arguments with another model, without what belongs to theirs."""
    of_theirs = {"revision", "download_dir"} if has_model(model) else {"revision"}
    return {name: value for name, value in args.items() if name not in of_theirs} | {"model": model}


def _at_commit(spec: FleetSpec) -> FleetSpec:
    """Return the application with the commit of its revision. Raises `ModelNotFetched`."""
    return spec.model_copy(update={"revision": spec.model_folder(Files.TEXT).name})


def find_model_folder(model: str) -> Path:
    """Find a model's folder. A relative path may start in the current folder or in Baton's checkout (for the demo).

    Raises `InvalidSpec`.
    """
    if (refusal := address_refusal(model)) is not None:
        raise InvalidSpec(f"model: {refusal}")
    candidates = _model_folders(model)
    for folder in candidates:
        if _has_config(folder):
            return folder
    looked_at = " and ".join(str(folder) for folder in candidates)
    raise InvalidSpec(
        f"model: {model!r} is not a model folder: there is no config.json in {looked_at}. Give one that has it; for"
        " `baton plan` that file is enough (--model FOLDER, as those in configs/models). Models of the Hub have names"
        " such as Qwen/Qwen3-0.6B"
    )


def has_model(model: str) -> bool:
    """Return whether the model's folder is on this machine."""
    return any(map(_has_config, _model_folders(model)))


def _has_config(folder: Path) -> bool:
    """Return whether this is a model's folder, even one with broken links."""
    file = folder / "config.json"
    return file.is_file() or file.is_symlink()


def _model_folders(model: str) -> list[Path]:
    here = Path(model).expanduser().absolute()
    return [here] if os.path.isabs(model) or here == CHECKOUT / model else [here, CHECKOUT / model]


def specs_in_file(path: Path, *, model: str | None = None, needs_model: bool = True) -> dict[str, FleetSpec]:
    """Load a file's applications, by name. `model` replaces theirs; for `needs_model` see `load_spec`.

    Raises `InvalidSpec`.
    """
    return load_specs(read_mapping(path), model=model, needs_model=needs_model)


def load_specs(
    content: Mapping[str, Any], *, model: str | None = None, needs_model: bool = True
) -> dict[str, FleetSpec]:
    """Load applications like `specs_in_file`, from the content of a file."""
    specs, problems = {}, []
    given = _applications_of(content)
    for name, args in given.items():
        try:
            specs[name] = load_spec(args if model is None else with_model(args, model), needs_model=needs_model)
        except InvalidSpec as error:
            whose = f"{name}: " if len(given) > 1 else ""
            problems += [whose + line for line in str(error).splitlines()]
    problems += _shared_ports(specs)
    if problems:
        raise InvalidSpec("\n".join(problems))
    return specs


def _shared_ports(specs: Mapping[str, FleetSpec]) -> Iterator[str]:
    """Describe applications whose gateways may be on one machine, where they would need the same port.

    With `hybrid` and `external` load balancing the ranks decide on which machines gateways are.
    """
    anywhere = [(name, spec) for name, spec in specs.items() if spec.load_balancing is LoadBalancing.INTERNAL]
    for (one, first), (other, second) in itertools.combinations(anywhere, 2):
        taken = first.gateway
        if (taken.port, taken.resources) == (second.gateway.port, second.gateway.resources):
            yield f"{other}: gateway.port: is {taken.port}, as that of {one}: give each application a port of its own"


class _Application(pydantic.BaseModel):
    """One application of a Serve config file, with the keys that Baton reads; Serve checks the others."""

    name: str = "default"  # Serve's default, as is the next one's
    route_prefix: str | None = "/"
    import_path: str
    args: dict[str, Any] = {}
    deployments: list[dict[str, Any]] = []


class _ServeFile(pydantic.BaseModel):
    applications: list[_Application]


def applications_in_file(path: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of Baton's applications in a file, by name. Raises `InvalidSpec`.

    The file is a Serve config, whose `deployments` are applied, or has the arguments of one application.
    """
    return _applications_of(read_mapping(path))


def _applications_of(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    if is_ray_cluster(content):
        raise InvalidSpec("describes a Ray cluster, for `ray up`, and no application: give one as in configs/serve")
    if "applications" not in content:
        return {DEFAULT_NAME: dict(content)}
    try:
        applications = _ServeFile.model_validate(content).applications
    except pydantic.ValidationError as error:
        raise InvalidSpec(describe(error)) from None
    if name := _repeated(each.name for each in applications):
        raise InvalidSpec(f"applications: two are named {name!r}; give each a `name` of its own")
    if prefix := _repeated(each.route_prefix for each in applications):
        raise InvalidSpec(f"applications: two have the route_prefix {prefix!r}; give each a `route_prefix` of its own")
    ours = [each for each in applications if each.import_path == IMPORT_PATH]
    if not ours:
        raise InvalidSpec(f"applications: none has import_path {IMPORT_PATH}, which is Baton's")
    changed, problems = {}, []
    for each in ours:
        try:
            changed[each.name] = with_deployments(each.args, each.deployments)
        except InvalidSpec as error:
            problems += [f"{each.name}: {line}" if len(ours) > 1 else line for line in str(error).splitlines()]
    if problems:
        raise InvalidSpec("\n".join(problems))
    return changed


def _repeated(values: Iterable[str | None]) -> str | None:
    """Return the first text that occurs twice; None if there is none."""
    return next((value for value, count in Counter(values).items() if value is not None and count > 1), None)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a file of settings. Raises `InvalidSpec`."""
    try:
        content = read_yaml(path.read_text())
    except (FileNotFoundError, IsADirectoryError) as error:  # perhaps a model's name or folder was given
        raise InvalidSpec(
            f"cannot be read: {error.strerror}. Give a config file, such as those in configs/serve; it names "
            "the model, or --model of `baton plan` does"
        ) from None
    except OSError as error:
        raise InvalidSpec(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidSpec("is not UTF-8 text") from None
    if not isinstance(content, dict):
        raise InvalidSpec(
            "must hold a mapping: a Serve config with `applications`, or the arguments of one application"
        )
    return content


@dataclass(frozen=True)
class RayCluster:
    """Machines on which `ray up` would start Ray."""

    name: str
    max_workers: int  # without the head
    tcp_only: str = ""  # setting of UCX that allows only TCP between machines, such as `UCX_TLS=tcp`; empty: none


def is_ray_cluster(content: Mapping[str, Any]) -> bool:
    """Return whether a file describes a Ray cluster and not applications: Ray requires this key."""
    return "cluster_name" in content


def load_ray_cluster(content: Mapping[str, Any]) -> RayCluster:
    """Check a cluster file without contacting a cloud or machine. Raises `InvalidSpec` if `ray up` would refuse it."""
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    provider = content.get("provider")
    if not (isinstance(provider, Mapping) and "type" in provider):
        raise InvalidSpec("provider: give `type: local`, `aws` or another that Ray knows, and what belongs to it")
    output = io.StringIO()
    try:
        # Ray prints the errors that it also raises, and logs the defaults that it fills in.
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), _warnings_alone("ray.autoscaler"):
            config = prepare_config(_without_single_files(content))
            validate_config(config)
    except jsonschema.ValidationError as error:
        place = ".".join(map(str, error.absolute_path))
        raise InvalidSpec(f"{place}: {error.message}" if place else error.message) from None
    except Exception as error:  # Ray's errors have no common type
        raise InvalidSpec(f"`ray up` would refuse it: {type(error).__name__}: {error}") from error
    sys.stderr.write(output.getvalue())
    return RayCluster(config["cluster_name"], config["max_workers"], _tcp_only(content))


def _without_single_files(content: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the files among `file_mounts` unless there are containers: Ray warns of them for the sake of those."""
    mounts = content.get("file_mounts")
    if content.get("docker") or not isinstance(mounts, Mapping):
        return dict(content)
    kept = {remote: local for remote, local in mounts.items() if not (isinstance(local, str) and Path(local).is_file())}
    return {**content, "file_mounts": kept}


@contextlib.contextmanager
def _warnings_alone(name: str) -> Iterator[None]:
    """Let a library log only warnings and errors inside the block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _tcp_only(content: Mapping[str, Any]) -> str:
    """Return the setting of `UCX_TLS` in the commands that start Ray, if it leaves only TCP between machines."""
    commands = [str(command) for key in START_COMMANDS for command in content.get(key) or ()]
    for name in re.findall(r"\bUCX_TLS=[\"']?([\w,]+)", "\n".join(commands)):
        transports = set(name.split(","))
        if "tcp" in transports and transports - {"tcp"} <= WITHIN_A_MACHINE:
            return f"UCX_TLS={name}"
    return ""


MOST_VALUES = 1_000_000  # of a file, counting an anchor wherever it is used
MOST_LEVELS = 200
TOO_DEEP = "cannot be read as YAML: it is nested too deeply"


@dataclass(frozen=True)
class _Extent:
    """The size of a value with all anchors expanded."""

    values: int = 1
    levels: int = 1


class _Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice in a mapping; other readers silently drop the first one.

    It checks keys as they are written, before anchors are merged (`<<`): overriding a merged key is no mistake.
    """

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


def read_yaml(text: str) -> Any:
    """Parse a YAML text. Raises `InvalidSpec` with the place of the error."""
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
        raise InvalidSpec(f"is not valid YAML: {where}{error.problem or error.context}") from None
    except RecursionError:
        raise InvalidSpec(TOO_DEEP) from None
    except (yaml.YAMLError, ValueError) as error:  # a character that YAML forbids, or an invalid date or number
        if isinstance(error, InvalidSpec):
            raise
        raise InvalidSpec(f"is not valid YAML: {' '.join(str(error).split())}") from None


def _check_extent(root: yaml.Node) -> None:
    """Refuse anchors that contain themselves, and content that is too large with its anchors expanded.

    A few lines of anchors that contain each other many times can stand for more than fits in any memory. The check
    takes time in proportion to the text. Raises `InvalidSpec`.
    """
    extents: dict[int, _Extent] = {}
    open_nodes: set[int] = set()

    def extent_of(node: yaml.Node) -> _Extent:
        if id(node) in open_nodes:
            raise InvalidSpec(f"cannot be read as YAML: {_line(node)}: an anchor contains itself")
        if id(node) not in extents:
            open_nodes.add(id(node))
            below = [extent_of(part) for part in _parts(node)]
            open_nodes.remove(id(node))
            values = 1 + sum(part.values for part in below)
            levels = 1 + max((part.levels for part in below), default=0)
            if values > MOST_VALUES:
                raise InvalidSpec(
                    f"cannot be read as YAML: {_line(node)}: its anchors stand for more than {MOST_VALUES} values"
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
