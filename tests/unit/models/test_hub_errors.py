"""Download errors that a test's server cannot cause: those of the disk, and of the library's other transport."""

from __future__ import annotations

import errno

import pytest

from baton.engine.hf_config.errors import ModelNotFetched
from baton.engine.hf_config.hub import errors_explained

ERRORS = [
    (
        OSError(errno.ENOSPC, "No space left on device", "/cache/blobs/1"),
        "the disk of /cache is too full for demo/model",
    ),
    (
        RuntimeError("Data processing error: IO Error: No space left on device (os error 28)"),
        "the disk of /cache is too",
    ),
    (
        PermissionError(errno.EACCES, "Permission denied", "/cache/refs"),
        "/cache/refs, cannot be written (Permission denied)",
    ),
    (
        RuntimeError("CAS client error\nmore of it"),
        "demo/model could not be fetched whole (CAS client error): start again",
    ),
]


@pytest.mark.parametrize(("error", "message"), ERRORS, ids=lambda value: type(value).__name__)
def test_errors_of_a_download_become_one_sentence(error: Exception, message: str) -> None:
    with pytest.raises(ModelNotFetched) as raised, errors_explained("demo/model", "main", "/cache"):
        raise error
    assert message in str(raised.value)
    assert raised.value.__cause__ is error
    assert "\n" not in str(raised.value)
