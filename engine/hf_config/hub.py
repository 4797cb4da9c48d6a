"""Models of the Hugging Face Hub: turns a name, such as `Qwen/Qwen3-8B`, into a folder of the local cache.

    name, revision ──TEXT──> snapshot with config.json, the tokenizer, the index of the weights
                   └─ALL───> the same snapshot, with the weights that the index names

`huggingface_hub` keeps the cache, locks each file against other processes of the machine, and reads its environment
variables: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE. A name that is also a local path means that folder. The
library's errors are raised as `ModelNotFetched`, with a sentence on what went wrong and one on what to change.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import INDEX_FILE, SINGLE_FILE, read_weight_map
from .errors import HubUnreachable, ModelNotFetched, WeightsError
from .folder import MODELOPT_FILE

logger = logging.getLogger(__name__)

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    MODELOPT_FILE,
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    # For tokenizers without a tokenizer.json, which can be made from these files.
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "*.tiktoken",
)
_NOT_READ = ("consolidated*", "*/*")  # the same weights under other names, and files in subfolders
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[str], None]  # called with a sentence about a download


class Files(enum.Enum):
    """The files of a model that a process needs."""

    TEXT = enum.auto()  # config.json and the tokenizer: for gateways, plans, and random weights
    ALL = enum.auto()  # the weights, too


def is_hub_name(model: str) -> bool:
    """Return whether `model` is a name of the Hub, ORG/NAME, and no path on this machine."""
    return _NAME.fullmatch(model) is not None and not os.path.lexists(model)


def address_refusal(model: str) -> str | None:
    """Return the reason for refusing a model given as a URL, such as s3://bucket/model; None for any other model."""
    if "://" not in model:
        return None
    return (
        f"{model!r} is an address, and a model is a folder or a name of the Hub: mount the bucket, or copy the model "
        "to a folder first (docs/operate/deploying.md, 'Buckets and shared folders')"
    )


def is_commit(revision: str | None) -> bool:
    """Return whether a revision is a full commit hash, whose files never change."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def model_folder(
    model: str,
    files: Files,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the folder of a model. For a name of the Hub, download files that the cache lacks first.

    `revision` is a branch, a tag or a commit, by default `main`; the returned folder is named after its commit.
    `download_dir` is the cache, by default that of `huggingface_hub`. `progress` is called now and then with the state
    of the weights' download, except on a terminal, where the library draws bars. Raises `ModelNotFetched`.
    """
    if (refusal := address_refusal(model)) is not None:
        raise ModelNotFetched(refusal)
    if not is_hub_name(model):
        if revision is not None:
            raise ModelNotFetched(f"revision is {revision!r}, and {model!r} is a folder, which has none: leave it out")
        return Path(model)
    text = _Repository(model, revision, download_dir).download(TEXT_FILES)
    if not (text / "config.json").is_file():
        raise ModelNotFetched(
            f"{model} has no config.json, so Baton cannot read it as a model; it holds {_held(model, text)}"
        )
    if files is Files.ALL:
        _fetch_weights(_Repository(model, text.name, download_dir), text, progress)
    return text


@dataclass(frozen=True)
class _Repository:
    """A model on the Hub, at a revision, and the cache of its files."""

    model: str
    revision: str | None  # None: main
    cache: str | None  # None: that of `huggingface_hub`

    def download(
        self,
        patterns: Sequence[str],
        *,
        ignored: Sequence[str] = (),
        make_bar: Callable[[threading.Event], type] | None = None,
    ) -> Path:
        """Download the files that match `patterns` and not `ignored`, and return the folder of the snapshot.

        `make_bar` returns the class of progress bars, given an event that ends the download; None: no bars.
        """
        # Imported here: it takes half a second, which local folders do not need.
        from huggingface_hub import snapshot_download

        from .hub_progress import NoBar, stopping_at_ctrl_c

        with errors_explained(self.model, self.revision, self.cache), stopping_at_ctrl_c() as stop:
            folder = snapshot_download(
                self.model,
                revision=self.revision,
                cache_dir=self.cache,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored) or None,
                tqdm_class=NoBar if make_bar is None else make_bar(stop),
            )
        return Path(folder)


def _fetch_weights(repository: _Repository, folder: Path, progress: Progress | None) -> None:
    """Download the weights that a snapshot, `folder`, lacks, and check their SHA-256."""
    model = repository.model
    wanted = _weight_files(folder)
    had = set(folder.glob("*.safetensors"))
    if wanted and had.issuperset(folder / name for name in wanted):
        return
    line = f"fetches the weights of {model}, commit {folder.name}"
    logger.info(line)
    if progress is not None:  # the only message in a process that waits for another process's download
        progress(line)
    started_s = time.monotonic()
    from .hub_progress import bar_class

    patterns, ignored = (wanted, ()) if wanted else (("*.safetensors",), _NOT_READ)
    repository.download(patterns, ignored=ignored, make_bar=functools.partial(bar_class, model, progress))
    found = set(folder.glob("*.safetensors"))
    if not found:
        raise ModelNotFetched(
            f"{model} has no *.safetensors, which alone are read; it holds {_held(model, folder)}: give a repository "
            "whose weights are safetensors, or convert them"
        )
    _check_digests(model, sorted(found - had))
    logger.info("has the weights of %s in %.0f s", model, time.monotonic() - started_s)


def _weight_files(folder: Path) -> Sequence[str]:
    """Return the names of a snapshot's weight files: those in the index, else `model.safetensors`, else none."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return (SINGLE_FILE,) if (folder / SINGLE_FILE).is_file() else ()
    try:
        return sorted(set(read_weight_map(index).values()))
    except WeightsError as error:
        raise ModelNotFetched(str(error)) from error


def _held(model: str, folder: Path) -> str:
    """Return the first file names of a repository, for a message."""
    from huggingface_hub import HfApi

    with errors_explained(model, folder.name, None):
        names = [name for name in HfApi().list_repo_files(model, revision=folder.name) if not name.startswith(".")]
    return ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "") if names else "no files"


def _check_digests(model: str, files: Sequence[Path]) -> None:
    """Compare files with their SHA-256, after which the Hub names their blobs. Remove wrong files, and raise.

    The library itself only checks sizes. A blob whose name has another length (on a mirror) is not checked.
    """
    named = {file: Path(os.readlink(file)) for file in files if file.is_symlink()}
    expected = {file: blob.name for file, blob in named.items() if _SHA256.fullmatch(blob.name)}
    with ThreadPoolExecutor(max_workers=8) as threads:
        digests = dict(zip(expected, threads.map(_sha256, expected), strict=True))
    wrong = [file for file, digest in digests.items() if digest != expected[file]]
    for file in wrong:
        file.resolve().unlink(missing_ok=True)  # another process may have removed it, too
        file.unlink(missing_ok=True)
    if wrong:
        raise ModelNotFetched(
            f"{model}: {', '.join(file.name for file in wrong)} did not arrive as the Hub has it (another SHA-256) and "
            "was removed: start again, and look at the mirror or proxy on the way if this returns"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def errors_explained(model: str, revision: str | None, cache: str | None) -> Iterator[None]:
    """Raise each error of `huggingface_hub` as `ModelNotFetched`, or as `HubUnreachable` if the Hub did not answer."""
    try:
        yield
    except Exception as error:  # errors of HTTP libraries and of Xet have no common base class
        raise _explained(error, model, revision, cache) from error


def _explained(error: Exception, model: str, revision: str | None, cache: str | None) -> ModelNotFetched:
    from huggingface_hub import constants, errors

    hub, folder = constants.ENDPOINT, cache or constants.HF_HUB_CACHE
    match error:
        case errors.GatedRepoError():
            return ModelNotFetched(
                f"{model} is gated: accept its terms at {hub}/{model}, and give a token of that account as HF_TOKEN"
            )
        case errors.RepositoryNotFoundError():
            return ModelNotFetched(
                f"{hub} has no model {model}, or a private one: check the name, or give a token that may read it as "
                "HF_TOKEN"
            )
        case errors.RevisionNotFoundError():
            return ModelNotFetched(
                f"{model} has no revision {revision!r}: give a branch, a tag or a commit that it has"
            )
        case errors.LocalEntryNotFoundError() if isinstance(error.__cause__, errors.HfHubHTTPError):
            return _refused(error.__cause__, model, hub)
        case errors.IncompleteSnapshotError() | errors.LocalEntryNotFoundError():
            snapshots = Path(folder, f"models--{model.replace('/', '--')}", "snapshots")
            held = f"holds a part of {model} only" if snapshots.is_dir() else f"does not hold {model}"
            return _unreachable(error, f"the cache, {folder}, {held}", hub)
        case errors.HfHubHTTPError():
            return _refused(error, model, hub)
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _disk_full(model, folder)
        case OSError() if error.filename is not None:
            return ModelNotFetched(
                f"{model}: the cache, {error.filename}, cannot be written ({error.strerror}): give another "
                "folder as HF_HOME or download_dir"
            )
    if "os error 28" in str(error):  # Xet's error for a full disk has no errno
        return _disk_full(model, folder)
    reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
    return ModelNotFetched(
        f"{model} could not be fetched whole ({reason[0]}): start again: files that are whole are kept"
    )


def _refused(error: Exception, model: str, hub: str) -> ModelNotFetched:
    status = error.response.status_code  # type: ignore[attr-defined]  # an HfHubHTTPError, whose module loads late
    if status in (401, 403):
        return ModelNotFetched(
            f"{hub} refuses {model} (status {status}): give a token that may read it as HF_TOKEN, on every node"
        )
    return HubUnreachable(
        f"{hub} answers with status {status} for {model}: try again later, or use a mirror (HF_ENDPOINT)"
    )


def _unreachable(error: Exception, state: str, hub: str) -> HubUnreachable:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return HubUnreachable(
            f"{state}, and HF_HUB_OFFLINE forbids to ask the Hub: fetch it with a network first, or set HF_HOME to a "
            "cache that holds it"
        )
    why = error.__cause__ or error
    return HubUnreachable(
        f"{state}, and {hub} cannot be reached ({str(why) or type(why).__name__}): check the network, or set "
        "HF_ENDPOINT to a mirror, or HF_HOME to a cache that holds it"
    )


def _disk_full(model: str, folder: str) -> ModelNotFetched:
    return ModelNotFetched(
        f"the disk of {folder} is too full for {model}: make room, or give another folder as HF_HOME or download_dir"
    )
