"""The process that tries addresses of UCX workers, each in its own fork, because UCX may end a process that uses one.

`ucx_probe` runs it. It calls UCX's C interface, because ucxx imports numpy, and imports nothing of this package. UCX is
not started before a fork, because it does not survive one.
"""

import ctypes
import mmap
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

# The answer if UCX does not start.
UNTRIED = 255
# What ucxx asks for: features TAG, RMA, WAKEUP, STREAM and AM.
_FEATURES = 1 << 0 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 6
_THREADS_MULTI = 2
_ERRORS_OF_PEERS = 1
_REMOTE_ADDRESS, _ERROR_MODE, _ERROR_HANDLER = 1 << 0, 1 << 1, 1 << 2
_STRUCT_BYTES = 1024
_REQUEST_BYTES_MAX = 1 << 17
_NUMBER_BYTES = 8
_TURNS = 16
# A trial takes about 20 ms.
_TRIAL_S = 5
_TRIAL_CPU_S = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PROT_NONE = 0


def main() -> None:
    """Answers each address with its number and how its trial ended: 0, the signal that killed it, or `UNTRIED`.

    Its arguments are the descriptor of its socket and the id of its parent.
    """
    socket_fd, parent = map(int, sys.argv[1:])
    end_with(parent)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    requests = socket.socket(fileno=socket_fd)
    load_ucx()
    while request := requests.recv(_REQUEST_BYTES_MAX):
        number, address = request[:_NUMBER_BYTES], request[_NUMBER_BYTES:]
        requests.send(number + bytes((attempt(address),)))


def end_with(parent: int) -> None:
    """Kills this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def load_ucx() -> None:
    """Loads the libraries that ucxx loads."""
    with suppress(ImportError):  # then the libraries are the system's
        import libucx

        libucx.load_library()
    ctypes.CDLL("libucp.so.0")


def attempt(address: bytes) -> int:
    """Uses an address in a fork; returns 0, the signal that ended it, or `UNTRIED`."""
    this = os.getpid()
    trial = os.fork()
    if not trial:
        end_with(this)
        resource.setrlimit(resource.RLIMIT_CPU, (_TRIAL_CPU_S, _TRIAL_CPU_S))
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        signal.alarm(_TRIAL_S)
        try:
            connect(address)
        except BaseException:  # noqa: BLE001  nothing of this fork may go on as its parent
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(trial, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    return UNTRIED if status else 0


def connect(address: bytes) -> None:
    """Makes an endpoint as `UcxLink.connect` does. An address that UCX refuses passes: the node gets the same error.

    Raises:
        OSError: UCX does not start, and would not start in the node.
    """
    ucp = ctypes.CDLL("libucp.so.0")
    version = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, version))
    config, context, worker, endpoint = (ctypes.c_void_p() for _ in range(4))
    _check(ucp.ucp_config_read(None, None, ctypes.byref(config)))
    _check(ucp.ucp_config_modify(config, b"MM_ERROR_HANDLING", b"y"))
    context_params = _fields(1, _FEATURES)
    _check(ucp.ucp_init_version(version[0], version[1], context_params, config, ctypes.byref(context)))
    _check(ucp.ucp_worker_create(context, _fields(1, _THREADS_MULTI), ctypes.byref(worker)))
    ignore = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(lambda *_: None)
    endpoint_params = _fields(
        _REMOTE_ADDRESS | _ERROR_MODE | _ERROR_HANDLER,
        copy_before_unreadable_page(address),
        _ERRORS_OF_PEERS,
        ctypes.cast(ignore, ctypes.c_void_p).value or 0,
    )
    if ucp.ucp_ep_create(worker, endpoint_params, ctypes.byref(endpoint)) == 0:
        for _ in range(_TURNS):
            ucp.ucp_worker_progress(worker)


def copy_before_unreadable_page(content: bytes) -> int:
    """Copies the bytes to the end of readable memory and returns the copy's address.

    UCX reads beyond damaged addresses. Here such a read ends the process every time; elsewhere that would depend on the
    memory after the copy.
    """
    page = mmap.PAGESIZE
    room = -(-len(content) // page) * page
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    wanted = mmap.PROT_READ | mmap.PROT_WRITE
    start = libc.mmap(None, ctypes.c_size_t(room + page), wanted, flags, -1, ctypes.c_long(0))
    assert start is not None
    assert libc.mprotect(ctypes.c_void_p(start + room), ctypes.c_size_t(page), _PROT_NONE) == 0
    at: int = start + room - len(content)
    ctypes.memmove(at, content, len(content))
    return at


def _fields(*values: int) -> ctypes.Array[ctypes.c_char]:
    """A struct of UCX whose first members these are, of 8 bytes each or aligned to 8."""
    encoded = b"".join(value.to_bytes(8, sys.byteorder) for value in values)
    return ctypes.create_string_buffer(encoded, _STRUCT_BYTES)


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"UCX does not start: status {status}")


if __name__ == "__main__":
    main()
