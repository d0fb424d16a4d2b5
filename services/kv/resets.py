"""A holder outlives its readers: the kernel drops the TCP resets that a gone reader answers with.

    guard = ResetGuard()
    guard.spread()                     now and then: every TCP socket of this process drops resets from here on

Over TCP, UCX emulates a read: the reader sends a request, the holder's UCX answers it as soon as it takes it from the socket. When that
`send` fails, UCX ends the whole process ("ucp_request.inl: Fatal: unexpected error: Endpoint timeout", ucp_request_try_send), whatever its
settings: error handling and keepalive concern endpoints, and this is no endpoint's error to it. It fails when the reader's kernel has reset
the connection while requests still wait in the holder's socket: the reader was killed, renewed its agent, or was cut off, was gone by the
time the link was back, and its kernel sent the requests again.

Without the reset the answers go nowhere, and the connection ends by a FIN, which is read behind the last request, or by TCP's own
time-outs, when no request is left: both are errors that UCX takes well. A holder waits for nothing on such a connection; its leases have
their own time. A reader must see resets, for a killed holder fails its reads by one; so only ranks that lease pages drop them.

For the same reason they send no keepalive probes, which UCX asks for where it connects: to a holder that stands still for 16 s, its readers
gone, these do what a reset does. TCP's other time-out, for bytes that nobody acknowledges, takes a quarter of an hour.

A socket filter of classic BPF on one's own socket needs no privilege; on TCP sockets newer kernels (6.18 among them) want CAP_NET_ADMIN.
Accepted sockets inherit that of the socket that listens.
"""
import contextlib
import ctypes
import logging
import os
import socket
import struct

from services.runtime.telemetry import count_incident

_SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>; Python has no name for it
_FLAGS_BYTE, _RST = 13, 0x04  # of a TCP header, where a TCP socket's filter begins
# (code, jump if true, jump if false, operand): load the flags; a reset is cut to 0 bytes, which drops it, all else passes whole
_PROGRAM = ((0x30, 0, 0, _FLAGS_BYTE), (0x45, 0, 1, _RST), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))

_log = logging.getLogger(__name__)


class ResetGuard:
    """Sockets of this process that drop resets."""

    def __init__(self) -> None:
        code = b"".join(struct.pack("HBBI", *step) for step in _PROGRAM)
        self._code = ctypes.create_string_buffer(code, len(code))
        self._filter = struct.pack("@HP", len(_PROGRAM), ctypes.addressof(self._code))  # struct sock_fprog
        self._guarded: set[str] = set()
        self._is_refused = False

    def spread(self) -> None:
        """Guard the TCP sockets opened since the last call. A kernel that takes no filter is told of once; resets then end the rank."""
        present: set[str] = set()
        for fd in os.listdir("/proc/self/fd"):
            if self._is_refused:
                return
            with contextlib.suppress(OSError):  # it was closed meanwhile
                name = os.readlink(f"/proc/self/fd/{fd}")
                if name.startswith("socket:"):
                    if name not in self._guarded:
                        self._guard(int(fd))
                    present.add(name)
        self._guarded = present

    def _guard(self, fd: int) -> None:
        with socket.socket(fileno=os.dup(fd)) as each:
            if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
                return
            each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
            try:
                each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, self._filter)
            except OSError as error:
                self._is_refused = True
                count_incident("reset guard refused")
                _log.warning("this kernel takes no socket filter from us (%s; newer ones want CAP_NET_ADMIN): over TCP, UCX may end this "
                             "rank when a reader of it dies", error)
