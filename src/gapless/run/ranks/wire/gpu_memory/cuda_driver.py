"""The few calls of NVIDIA's driver that torch does not offer: memory that another process can open, and numbers that
streams write and wait for. Nothing here waits for a GPU but `read_back`.
"""

import ctypes
import threading
from typing import Any

import torch

from gapless.errors import TransportError
from gapless.run.held_memory import messages

_ADDRESS, _STREAM, _SIZE = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
_HANDLE_SIZE = 64
_PEER_ACCESS = 1  # when a handle is opened: also from another GPU
_FOR_ALL = 1 | 2  # when memory of the host is registered: for every context, at an address that the GPU knows
_AT_LEAST = 0  # how a number is waited for


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_SIZE),)


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuMemAlloc_v2": (ctypes.POINTER(_ADDRESS), _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _ADDRESS, _SIZE),
    "cuMemcpyHtoD_v2": (_ADDRESS, ctypes.c_void_p, _SIZE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, _SIZE, _STREAM),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_ubyte, _SIZE, _STREAM),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_ADDRESS), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuMemHostRegister_v2": (ctypes.c_void_p, _SIZE, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_ADDRESS), ctypes.c_void_p, ctypes.c_uint),
    "cuStreamWriteValue64_v2": (_STREAM, _ADDRESS, ctypes.c_uint64, ctypes.c_uint),
    "cuStreamWaitValue64_v2": (_STREAM, _ADDRESS, ctypes.c_uint64, ctypes.c_uint),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class DriverError(TransportError):
    """A call of the driver failed."""


class Driver:
    """The driver, for one GPU of this process. Addresses are numbers; streams are torch's `cuda_stream`."""

    def __init__(self, gpu: torch.device) -> None:
        self.gpu = gpu
        try:
            library: Any = ctypes.CDLL("libcuda.so.1")
            for name, types in _CALLS.items():
                getattr(library, name).argtypes = types
        except (OSError, AttributeError) as error:
            raise DriverError(f"NVIDIA's driver can't be called: {error}") from None
        self._library = library
        self._copy, self._write = library.cuMemcpyDtoDAsync_v2, library.cuStreamWriteValue64_v2
        self._wait = library.cuStreamWaitValue64_v2
        self._threads = threading.local()
        self._sizes: dict[int, int] = {}  # of what was allocated, by address
        torch.cuda.synchronize(gpu)  # there is a context
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check(library.cuDeviceGet(device, gpu.index or 0))
        self._check(library.cuDevicePrimaryCtxRetain(self._context, device))

    def enter(self) -> None:
        """Every thread that calls the driver does this before; a second time costs nothing."""
        if not hasattr(self._threads, "entered"):
            self._check(self._library.cuCtxSetCurrent(self._context))
            self._threads.entered = True

    def current_stream(self) -> int:
        """That of the calling thread."""
        stream: int = torch._C._cuda_getCurrentRawStream(self.gpu.index or 0)
        return stream

    def allocate(self, size: int) -> int:
        """Memory that is not torch's, so that it can be opened elsewhere."""
        found = _ADDRESS()
        self._check(self._library.cuMemAlloc_v2(found, size))
        messages[str(self.gpu)] += size
        self._sizes[found.value] = size
        return found.value

    def free(self, address: int) -> None:
        self._check(self._library.cuMemFree_v2(address))
        messages[str(self.gpu)] -= self._sizes.pop(address)

    def export(self, address: int) -> bytes:
        """By which another process opens the memory."""
        handle = _Handle()
        self._check(self._library.cuIpcGetMemHandle(handle, address))
        return bytes(handle.bytes)

    def open(self, exported: bytes) -> int:
        """Memory of another process; once at a time."""
        found, handle = _ADDRESS(), _Handle.from_buffer_copy(exported)
        self._check(self._library.cuIpcOpenMemHandle_v2(found, handle, _PEER_ACCESS))
        return found.value

    def close(self, address: int) -> None:
        self._check(self._library.cuIpcCloseMemHandle(address))

    def register(self, address: int, size: int) -> int:
        """Memory of the host, whole pages, for streams to write into and wait at; its address for them."""
        found = _ADDRESS()
        self._check(self._library.cuMemHostRegister_v2(address, size, _FOR_ALL))
        self._check(self._library.cuMemHostGetDevicePointer_v2(found, address, 0))
        return found.value

    def unregister(self, address: int) -> None:
        self._check(self._library.cuMemHostUnregister(address))

    def put(self, address: int, data: bytes) -> None:
        """Waits until it is there: the copy itself may return while it is still on its way."""
        self._check(self._library.cuMemcpyHtoD_v2(address, data, len(data)))
        self.read_back(address, len(data))

    def read_back(self, address: int, size: int) -> bytes:
        """Waits until all is there."""
        place = ctypes.create_string_buffer(size)
        self._check(self._library.cuMemcpyDtoH_v2(place, address, size))
        return place.raw

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """From the GPU's memory to the GPU's memory, in the order of the stream."""
        if failed := self._copy(target, source, size, stream):
            self._check(failed)

    def fill(self, address: int, byte: int, size: int, stream: int) -> None:
        """The same byte everywhere, in the order of the stream."""
        self._check(self._library.cuMemsetD8Async(address, byte, size, stream))

    def write(self, address: int, number: int, stream: int) -> None:
        """Once all that is before it in the stream is done, for everybody to see."""
        if failed := self._write(stream, address, number, 0):
            self._check(failed)

    def wait(self, address: int, number: int, stream: int) -> None:
        """What comes after it in the stream starts when the number there is at least this."""
        if failed := self._wait(stream, address, number, _AT_LEAST):
            self._check(failed)

    def _check(self, failed: int) -> None:
        if failed:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(failed, name)
            raise DriverError(f"a call of NVIDIA's driver failed: {(name.value or b'unknown').decode()}")
