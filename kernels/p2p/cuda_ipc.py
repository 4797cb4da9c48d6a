"""Device memory that processes of one machine share, by CUDA IPC handles.

It uses ctypes, since torch only shares memory of its own allocator, with reference counters in files. A process may
open the memory of a device that it does not see (`CUDA_VISIBLE_DEVICES`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class DriverError(Exception):
    """A call to the driver failed: its name and the driver's error."""


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * _HANDLE_BYTES)]


class DeviceMemory:
    """Device memory allocated in the context that is current, or another process's, opened by its handle."""

    def __init__(self, address: int, *, opened: bool) -> None:
        self.address = address
        self._opened = opened
        self._context = _current_context()

    @classmethod
    def allocate(cls, num_bytes: int) -> DeviceMemory:
        """Allocate device memory. Raises `DriverError`."""
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return cls(address.value, opened=False)

    @classmethod
    def open(cls, handle: bytes) -> DeviceMemory:
        """Open memory that another process allocated. Raises `DriverError`, also if this device cannot access it."""
        address = ctypes.c_uint64()
        flags = ctypes.c_uint(_ENABLE_PEER_ACCESS)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
        return cls(address.value, opened=True)

    def handle(self) -> bytes:
        """Return the handle for `open`. Raises `DriverError`."""
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    def num_bytes(self) -> int:
        """Return the size of the whole allocation, as the driver knows it. Raises `DriverError`."""
        _, num_bytes = _allocation_around(self.address)
        return num_bytes

    def fill(self, value: int, count: int) -> None:
        """Fill with a 16-bit value, `count` times. Raises `DriverError`."""
        _call("cuMemsetD16_v2", ctypes.c_uint64(self.address), ctypes.c_ushort(value & 0xFFFF), ctypes.c_size_t(count))
        _call("cuCtxSynchronize")

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes to the device. Raises `DriverError`."""
        _call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address + offset), data, ctypes.c_size_t(len(data)))
        _call("cuCtxSynchronize")

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Copy bytes from the device. Raises `DriverError`."""
        data = ctypes.create_string_buffer(num_bytes)
        _call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(self.address + offset), ctypes.c_size_t(num_bytes))
        return data.raw

    def free(self) -> None:
        """Free or close the memory, once, from any thread, after the last kernel that uses it. Raises `DriverError`."""
        with _as_current(self._context):
            _call("cuIpcCloseMemHandle" if self._opened else "cuMemFree_v2", ctypes.c_uint64(self.address))


def shared_handle(address: int) -> tuple[bytes, int]:
    """Return the handle of the allocation around `address`, for `DeviceMemory.open` elsewhere, and the offset in it.

    Raises `DriverError` if the memory cannot be shared, for example in torch's expandable segments.
    """
    base, _ = _allocation_around(address)
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    return bytes(handle), address - base


def copy_async(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Start a copy between two addresses that the device can access, in a stream. Raises `DriverError`."""
    sizes = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes)
    _call("cuMemcpyAsync", *sizes, ctypes.c_void_p(stream))


def _allocation_around(address: int) -> tuple[int, int]:
    """Return the first address and the size of the allocation, our own or an opened one, that `address` is in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return base.value, size.value


def _call(name: str, *args: object) -> None:
    driver = _driver()
    result = getattr(driver, name)(*args)
    if result != 0:
        word = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(word))
        raise DriverError(f"{name} gave {(word.value or b'').decode() or result}")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"there is no CUDA driver: {error}") from error


def _current_context() -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    return context


@contextmanager
def _as_current(context: ctypes.c_void_p) -> Iterator[None]:
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
