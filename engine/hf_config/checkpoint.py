"""The tensors in a folder of safetensors files, read from their headers only.

    8 bytes: length n of the header, little endian | n bytes: JSON {name: {dtype, shape, data_offsets}} | data

(https://github.com/huggingface/safetensors#format). A missing, broken or incomplete file is found here, before minutes
are spent on reading weights.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec

from baton.engine.absent import FETCH_AGAIN, absent_file
from baton.engine.hf_config.errors import WeightsError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_SAMPLE_BYTES = 1024
_NUM_SAMPLES = 64  # places at which two tensors are compared
_NAMED_IN_ERRORS = 8
_OTHER_KINDS = ("*.bin", "*.pt", "*.pth", "*.gguf")  # files with weights that Baton does not read
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")

# safetensors' name of a dtype -> bytes per element, torch's name
DTYPES = {"F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16")}
_CACHE_SCALE = re.compile(r"(.+)\.[kv]_proj\.([kv]_scale)")  # NVIDIA Model Optimizer's names of the KV cache's scales
E4M3 = "F8_E4M3"  # safetensors' name of FP8 weights, which are useless without their scales


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint. Its data is bytes [begin, end) of the file."""

    name: str
    file: Path
    dtype: str  # safetensors' name: "F32", "BF16", ...
    shape: tuple[int, ...]
    begin: int
    end: int
    renamed_from: str | None = None

    @property
    def name_in_file(self) -> str:
        return self.renamed_from or self.name

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    def seems_equal(self, other: TensorEntry) -> bool:
        """Return whether two tensors have the same dtype, shape and sampled values."""
        alike = (self.dtype, self.shape) == (other.dtype, other.shape)
        return alike and all(map(operator.eq, self._samples(), other._samples()))

    def _samples(self) -> Iterator[bytes]:
        """Yield the values at `_NUM_SAMPLES` places that are spread evenly over the tensor."""
        room = max(self.size_bytes - _SAMPLE_BYTES, 0)
        with self.file.open("rb") as stream:
            for place in range(_NUM_SAMPLES):
                stream.seek(self.begin + room * place // (_NUM_SAMPLES - 1))
                yield stream.read(min(_SAMPLE_BYTES, self.size_bytes))


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Described(msgspec.Struct):
    """A tensor in the header of a safetensors file. Offsets count from the end of the header."""

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


class _Index(msgspec.Struct):
    """model.safetensors.index.json: the file that each tensor is in."""

    weight_map: dict[str, str]


class Checkpoint:
    """The tensors of a folder by name, in one file or in many shards."""

    def __init__(self, folder: Path, entries: dict[str, TensorEntry], index: Mapping[str, Path]) -> None:
        self.folder = folder
        self.entries = entries
        self.index = index

    def expected_in(self, name: str) -> str:
        """Return a tensor's name with the file that should contain it according to the index, for error messages."""
        return f"{name} (of {self.index[name].name})" if name in self.index else name

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read all headers. If a tensor is in several files, the file that the index names is used.

        Raises `WeightsError` if a file is missing or broken, or if a tensor is in two files and the index names
        neither.
        """
        index = _read_index(folder)
        entries: dict[str, TensorEntry] = {}
        for file in _files(folder, index):
            for entry in _read_header(file):
                entries[entry.name] = _of_two(entries.get(entry.name), entry, index.get(entry.name))
        return cls(folder, entries, index)

    @property
    def dtype(self) -> str | None:
        """Torch's name of the dtype that most tensors have; None if no tensor has a floating-point dtype."""
        known = [entry.dtype for entry in self.entries.values() if entry.dtype in DTYPES]
        return DTYPES[max(sorted(set(known)), key=known.count)][1] if known else None

    def has_8_bit_weight(self, layer: str) -> bool:
        """Return whether the weight of this linear layer, or the stack of matrices of this name, is in 8 bits."""
        entry = self.entries.get(f"{layer}.weight") or self.entries.get(layer)
        return entry is not None and entry.dtype == E4M3

    @property
    def has_cache_scales(self) -> bool:
        """True if the checkpoint has calibrated scales for cached keys and values."""
        return any(name.endswith(".k_scale") for name in self.entries)

    def by_file(self) -> Iterator[tuple[Path, list[TensorEntry]]]:
        """Yield the entries of each file in the order of their data, so that the file is read sequentially."""
        ordered = sorted(self.entries.values(), key=lambda entry: (entry.file, entry.begin))
        for file, entries in groupby(ordered, key=lambda entry: entry.file):
            yield file, list(entries)

    def fingerprint(self) -> str:
        """Return a hash (32 hex digits) of each tensor's name, dtype, shape and samples, whatever the sharding.

        Samples distinguish fine-tunes of the same model, whose headers are equal.
        """
        lines = {}
        for file, entries in self.by_file():
            with file.open("rb") as stream:
                for entry in entries:
                    stream.seek(entry.begin + max(entry.size_bytes - _SAMPLE_BYTES, 0) // 2)
                    sample = stream.read(min(_SAMPLE_BYTES, entry.size_bytes))
                    lines[entry.name] = f"{entry.name} {entry.dtype} {entry.shape} ".encode() + sample
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(lines):
            digest.update(len(lines[name]).to_bytes(8, "little") + lines[name])
        return digest.hexdigest()


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights of any format, readable by Baton or not, complete or not."""
    return any(True for pattern in (INDEX_FILE, "*.safetensors", *_OTHER_KINDS) for _ in folder.glob(pattern))


def some(names: list[str]) -> str:
    """Return the first names, and how many more there are, for a message."""
    rest = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {rest} more" if rest > 0 else "")


def _of_two(known: TensorEntry | None, found: TensorEntry, home: Path | None) -> TensorEntry:
    """Return the entry to use of two for the same tensor; `home` is the tensor's file according to the index."""
    if known is None or home == found.file:
        return found
    if home == known.file:
        return known
    raise WeightsError(
        f"{found.file.parent}: tensor {found.name!r} is in {known.file.name} and again in {found.file.name}"
    )


def _read_index(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor; empty without an index."""
    path = folder / INDEX_FILE
    if path.is_symlink() and not path.exists():
        raise WeightsError(f"{folder} has no {absent_file(path)}: {FETCH_AGAIN}")
    if not path.is_file():
        return {}
    weight_map = read_weight_map(path)
    paths = {file: folder / file for file in set(weight_map.values())}  # shared: there may be 100 000 tensors
    return {name: paths[file] for name, file in weight_map.items()}


def read_weight_map(path: Path) -> Mapping[str, str]:
    """Return the file name of each tensor from an index file. Raises `WeightsError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except msgspec.DecodeError as error:
        raise WeightsError(f"{path} is not an index of safetensors files: {error}") from error


def _files(folder: Path, index: Mapping[str, Path]) -> list[Path]:
    """Return the checkpoint's safetensors files: those in the index, else the single file, else all in the folder."""
    if index:
        named = sorted(set(index.values()))
        missing = [absent_file(file) for file in named if not file.is_file()]
        if missing:
            names = some(missing)
            raise WeightsError(f"{folder}: {INDEX_FILE} names files that are not there: {names}; {FETCH_AGAIN}")
        return named
    single = folder / SINGLE_FILE
    files = [single] if single.is_file() or single.is_symlink() else sorted(folder.glob("*.safetensors"))
    missing = [absent_file(file) for file in (*_absent_numbers(files), *files) if not file.is_file()]
    if missing:
        raise WeightsError(f"{folder}: files are not there: {some(missing)}; {FETCH_AGAIN}")
    if not files:
        others = sorted(path.name for pattern in _OTHER_KINDS for path in folder.glob(pattern))
        found = f" (found {', '.join(others)}, which is not read: convert it to safetensors)" if others else ""
        raise WeightsError(f"{folder}: no *.safetensors files{found}; give load_format='dummy' for random weights")
    return files


def _absent_numbers(files: list[Path]) -> Iterator[Path]:
    """Yield missing files that the others' names imply: `model-00002-of-00003.safetensors` is one of three."""
    series = {(match[1], match[3]) for file in files if (match := _NUMBERED.fullmatch(file.name))}
    for stem, count in sorted(series):
        named = (f"{stem}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1))
        yield from (file for name in named if (file := files[0].parent / name) not in files)


def _read_header(file: Path) -> list[TensorEntry]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
                kind = "is not a safetensors file, or it is cut off in its header"
                raise WeightsError(f"{file} {kind} ({size} bytes): {FETCH_AGAIN}")
            text = stream.read(header_bytes)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror}") from error
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = [_entry(file, name, value, 8 + header_bytes) for name, value in header.items()]
    except msgspec.DecodeError as error:
        raise WeightsError(f"{file}: the safetensors header is broken: {error}") from error
    for entry in entries:
        if entry.end > size:
            ends = f"tensor {entry.name!r} ends at byte {entry.end}, the file at {size}"
            raise WeightsError(f"{file} is cut off: {ends}; {FETCH_AGAIN}")
        item_bytes = 1 if entry.dtype == E4M3 else DTYPES.get(entry.dtype, (0, ""))[0]
        if item_bytes and entry.size_bytes != math.prod(entry.shape) * item_bytes:
            raise WeightsError(
                f"{file}: tensor {entry.name!r} of {entry.dtype} {entry.shape} has {entry.size_bytes} bytes"
            )
    return entries


def _entry(file: Path, name: str, value: msgspec.Raw, data_start: int) -> TensorEntry:
    described = msgspec.json.decode(value, type=_Described)
    begin, end = described.data_offsets
    end = max(begin, end)
    entry = TensorEntry(name, file, described.dtype, described.shape, data_start + begin, data_start + end)
    scale = _CACHE_SCALE.fullmatch(name)
    return entry if scale is None else replace(entry, name=f"{scale[1]}.{scale[2]}", renamed_from=name)
