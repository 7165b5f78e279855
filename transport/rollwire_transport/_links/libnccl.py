"""The few functions of libnccl that a broadcast needs, none of which waits for a peer.

torch's ProcessGroupNCCL would not do: its watchdog thread ends the process when a collective fails
or times out, and its set-up cannot be cancelled. Here a communicator's failure is an error code.

The library is the one that torch has loaded. ``NCCL_*`` variables act as documented by NVIDIA.
SGLang sets ``NCCL_CUMEM_ENABLE=0`` in its own processes; beside it, both ends need that too.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p

UNIQUE_ID_BYTES = 128

_SONAME = "libnccl.so.2"
_OLDEST = 21800  # 2.18.0 by ncclGetVersion; all that is used here is in it

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1


class NcclError(Exception):
    """A function of NCCL failed; the communicator must be aborted."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of 2.17; later versions read the size and version in it."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    )


_UNDEFINED = -(1 << 31)

_FUNCTIONS = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(_Config)],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclCommAbort": [c_void_p],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclBroadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
}


@functools.cache
def load() -> ctypes.CDLL:
    """The library; OSError if there is none, or it is too old."""
    library = ctypes.CDLL(_SONAME)
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    library.ncclGetErrorString.argtypes = [c_int]
    library.ncclGetErrorString.restype = c_char_p
    library.ncclGetLastError.argtypes = [c_void_p]
    library.ncclGetLastError.restype = c_char_p
    version = c_int()
    library.ncclGetVersion(ctypes.byref(version))
    if version.value < _OLDEST:
        raise OSError(f"{_SONAME} has version {version.value}, but {_OLDEST} or later is needed")
    return library


def unique_id() -> bytes:
    """A unique id for one communicator, which starts to listen for its members."""
    made = _UniqueId()
    _check(load().ncclGetUniqueId(ctypes.byref(made)), None)
    return bytes(made)


class Communicator:
    """One rank of a communicator on the current CUDA device.

    No call blocks: ``ready`` says when it may be used again. Not for several threads at once.
    """

    def __init__(self, unique_id: bytes, rank: int, world_size: int) -> None:
        self._library = load()
        self._handle = c_void_p()
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=0xCAFEBEEF,
            version=_OLDEST,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
            net_name=None,
            split_share=_UNDEFINED,
        )
        result = self._library.ncclCommInitRankConfig(
            ctypes.byref(self._handle),
            world_size,
            _UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(config),
        )
        if result not in (_SUCCESS, _IN_PROGRESS):
            self.abort()
            _check(result, None)

    def ready(self) -> bool:
        """Whether the last call on it has been carried out, or queued on its stream."""
        state = c_int()
        _check(self._library.ncclCommGetAsyncError(self._handle, ctypes.byref(state)), self._handle)
        _check(state.value, self._handle)
        return state.value == _SUCCESS

    def broadcast(self, runs: list[tuple[int, int]], stream: int) -> None:
        """Broadcasts runs (address, bytes) of rank 0's memory in place, as one operation."""
        library = self._library
        _check(library.ncclGroupStart(), self._handle)
        results = [
            library.ncclBroadcast(address, address, size, _UINT8, 0, self._handle, stream)
            for address, size in runs
        ]
        results.append(library.ncclGroupEnd())
        for result in results:
            _check(result, self._handle)

    def abort(self) -> None:
        """Ends it and its work on the device, and frees it. May take a moment."""
        if self._handle:
            self._library.ncclCommAbort(self._handle)
            self._handle = c_void_p()


def _check(result: int, communicator: c_void_p | None) -> None:
    if result not in (_SUCCESS, _IN_PROGRESS):
        library = load()
        what = library.ncclGetErrorString(result).decode()
        details = (library.ncclGetLastError(communicator) or b"").decode(errors="replace").strip()
        raise NcclError(f"{what}: {details}" if details else what)
