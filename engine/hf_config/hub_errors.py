"""Errors of downloads from the Hub: what went wrong with a model, and what to change, in a sentence each."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from .errors import HubUnreachable, ModelNotFetched


@contextlib.contextmanager
def errors_explained(model: str, revision: str | None, cache: str | None) -> Iterator[None]:
    """Raise each error of `huggingface_hub` as `ModelNotFetched`, or as `HubUnreachable` where there was no answer."""
    try:
        yield
    except Exception as error:  # those of HTTP libraries and of Xet have no common type
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
    if "os error 28" in str(error):  # Xet's, which has no errno
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
        return HubUnreachable(f"{state}, and HF_HUB_OFFLINE forbids to ask the Hub: fetch it with a network first")
    why = error.__cause__ or error
    return HubUnreachable(
        f"{state}, and {hub} cannot be reached ({str(why) or type(why).__name__}): check the network, or set "
        "HF_ENDPOINT to a mirror"
    )


def _disk_full(model: str, folder: str) -> ModelNotFetched:
    return ModelNotFetched(
        f"the disk of {folder} is too full for {model}: make room, or give another folder as HF_HOME or download_dir"
    )
