"""One-sided reads of UCX (`ucp.h`, 1.21): the part of its C API that UCXX wraps in C++ but not in Python.

Contexts, workers and endpoints are UCXX's, which exposes their handles. All calls return at once.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

from ..errors import NotRegistrable, TransportError

Handle = int

OK = 0
IN_PROGRESS = 1
LAST_ERROR = -100  # UCS_ERR_LAST: a returned pointer from here to -1, read as a signed number, is an error code

_MAP_ADDRESS, _MAP_LENGTH, _MAP_MEMORY_TYPE = 1 << 0, 1 << 1, 1 << 4
_MEMORY_TYPES = {"cpu": 0, "cuda": 1}
_GET_WITH_REGISTERED_MEMORY = 1 << 8


class _MapParams(ctypes.Structure):
    """ucp_mem_map_params_t"""

    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    ]


class _RequestParams(ctypes.Structure):
    """ucp_request_param_t"""

    _fields_ = [
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "ucp_get_version": (None, [POINTER(c_uint), POINTER(c_uint), POINTER(c_uint)]),
    "ucp_mem_map": (c_int, [c_void_p, POINTER(_MapParams), POINTER(c_void_p)]),
    "ucp_mem_unmap": (c_int, [c_void_p, c_void_p]),
    "ucp_rkey_pack": (c_int, [c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_rkey_buffer_release": (None, [c_void_p]),
    "ucp_ep_rkey_unpack": (c_int, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "ucp_rkey_destroy": (None, [c_void_p]),
    "ucp_get_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(_RequestParams)]),
    "ucp_request_check_status": (c_int, [c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
}


class Ucp:
    """The UCX library that UCXX has loaded. Its `TransportError`s name what failed and UCX's reason."""

    def __init__(self) -> None:
        self._ucp = ctypes.CDLL("libucp.so.0")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._ucp, name)
            function.restype, function.argtypes = result, arguments
        self._status_string = ctypes.CDLL("libucs.so.0").ucs_status_string
        self._status_string.restype, self._status_string.argtypes = c_char_p, [c_int]
        self._plain = _RequestParams()

    @property
    def version(self) -> str:
        """The version of the API and of the wire protocol, such as `1.21`."""
        major, minor, release = c_uint(), c_uint(), c_uint()
        self._ucp.ucp_get_version(byref(major), byref(minor), byref(release))
        return f"{major.value}.{minor.value}"

    def reason(self, status: int) -> str:
        return self._status_string(status).decode(errors="replace")

    def register(self, context: Handle, address: int, num_bytes: int, kind: str) -> Handle:
        """Register memory of `kind` "cpu" or "cuda"."""
        params = _MapParams(
            field_mask=_MAP_ADDRESS | _MAP_LENGTH | _MAP_MEMORY_TYPE,
            address=address,
            length=num_bytes,
            memory_type=_MEMORY_TYPES[kind],
        )
        memory = c_void_p()
        status = self._ucp.ucp_mem_map(context, byref(params), byref(memory))
        if status != OK:
            raise NotRegistrable(f"cannot register {num_bytes} bytes of {kind} memory: {self.reason(status)}")
        assert memory.value, "registered memory has a handle"
        return memory.value

    def deregister(self, context: Handle, memory: Handle) -> None:
        self._check(self._ucp.ucp_mem_unmap(context, memory), "cannot deregister memory")

    def pack_key(self, context: Handle, memory: Handle) -> bytes:
        """Return the key that a peer needs to read the memory."""
        buffer, size = c_void_p(), c_size_t()
        status = self._ucp.ucp_rkey_pack(context, memory, byref(buffer), byref(size))
        self._check(status, "cannot pack the key of our memory")
        try:
            return ctypes.string_at(buffer, size.value)
        finally:
            self._ucp.ucp_rkey_buffer_release(buffer)

    def unpack_key(self, endpoint: Handle, key: bytes) -> Handle:
        unpacked = c_void_p()
        status = self._ucp.ucp_ep_rkey_unpack(endpoint, key, byref(unpacked))
        self._check(status, "cannot use the key of a peer's memory")
        assert unpacked.value, "an unpacked key has a handle"
        return unpacked.value

    def destroy_key(self, key: Handle) -> None:
        self._ucp.ucp_rkey_destroy(key)

    def registered(self, memory: Handle) -> _RequestParams:
        """Return the parameters for a `get` into registered memory."""
        return _RequestParams(op_attr_mask=_GET_WITH_REGISTERED_MEMORY, memh=memory)

    def get(
        self,
        endpoint: Handle,
        key: Handle,
        remote_address: int,
        address: int,
        num_bytes: int,
        params: _RequestParams | None = None,
    ) -> tuple[int, Handle]:
        """Begin to read. Returns the status and, if that is `IN_PROGRESS`, a request for `check` and `free`."""
        request = self._ucp.ucp_get_nbx(endpoint, address, num_bytes, remote_address, key, params or self._plain)
        if not request:
            return OK, 0
        error = request - 2**64
        if error >= LAST_ERROR:
            return error, 0
        return IN_PROGRESS, request

    def check(self, request: Handle) -> int:
        """Return `IN_PROGRESS`, or the final status, after which nothing writes any more."""
        return self._ucp.ucp_request_check_status(request)

    def free(self, request: Handle) -> None:
        self._ucp.ucp_request_free(request)

    def _check(self, status: int, what: str) -> None:
        if status != OK:
            raise TransportError(f"{what}: {self.reason(status)}")
