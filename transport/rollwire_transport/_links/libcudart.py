"""The few functions of the CUDA runtime by which processes share memory of a device.

Memory that torch allocates is no good for that: with expandable segments it cannot be exported at
all, and an export is a whole block of its cache.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import torch

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class CudaError(Exception):
    """A function of the CUDA runtime failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


_FUNCTIONS = {
    "cudaMalloc": [POINTER(c_void_p), c_size_t],
    "cudaFree": [c_void_p],
    "cudaIpcGetMemHandle": [POINTER(_Handle), c_void_p],
    "cudaIpcOpenMemHandle": [POINTER(c_void_p), _Handle, c_uint],
    "cudaIpcCloseMemHandle": [c_void_p],
}


@functools.cache
def load() -> ctypes.CDLL:
    """The library that torch has loaded; OSError if there is none."""
    if torch.version.cuda is None:
        raise OSError("this build of torch has no CUDA")
    library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = [c_int], c_char_p
    return library


class SharedMemory:
    """Memory of a device that other processes can open, or that was opened here.

    The device must be the current one for all of this.
    """

    def __init__(self, address: int, nbytes: int, *, opened: bool) -> None:
        self.nbytes = nbytes
        self._address = address
        self._opened = opened
        value = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = value

    @classmethod
    def allocate(cls, nbytes: int) -> SharedMemory:
        """Raises CudaError if there is none left."""
        address = c_void_p()
        _call("cudaMalloc", ctypes.byref(address), nbytes)
        return cls(address.value or 0, nbytes, opened=False)

    @classmethod
    def open(cls, handle: bytes, nbytes: int) -> SharedMemory:
        """Opens another process's; raises CudaError if that cannot be done here."""
        address = c_void_p()
        exported = _Handle.from_buffer_copy(handle)
        _call("cudaIpcOpenMemHandle", ctypes.byref(address), exported, _LAZY_PEER_ACCESS)
        return cls(address.value or 0, nbytes, opened=True)

    def handle(self) -> bytes:
        exported = _Handle()
        _call("cudaIpcGetMemHandle", ctypes.byref(exported), self._address)
        return bytes(exported.bytes)

    def tensor(self) -> torch.Tensor:
        """All of it, uint8. It must not be used after ``release``."""
        return torch.as_tensor(self, device=torch.device("cuda", torch.cuda.current_device()))

    def release(self) -> None:
        """Frees what was allocated here, closes what was opened."""
        _call("cudaIpcCloseMemHandle" if self._opened else "cudaFree", self._address)


def _call(name: str, *arguments: Any) -> None:
    library = load()
    if result := getattr(library, name)(*arguments):
        raise CudaError(f"{name}: {library.cudaGetErrorString(result).decode()}")
