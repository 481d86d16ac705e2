"""Refuses system calls by which a process would get around its wall: a seccomp filter for a process
that restricts itself.

Landlock refuses TCP connections where `connect` asks for them, and nothing else: not multipath TCP,
SCTP or SMC, and not a connection that the first bytes sent open (TCP Fast Open). Keys of the kernel
belong to a user and not to a namespace. A process with a cgroup namespace of its own can mount the
groups that it shares with the trainer. And what io_uring does, no filter sees.

The kernel applies a filter to the process that asks for it and to its descendants, and none of them
can undo it. Invariant: a refused call fails as on a kernel that does not have it, so that programs
do without. Uses only the standard library, so that a program that starts agents can load this file
alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass

PR_GET_SECCOMP = 21
SET_MODE_FILTER, SPEC_ALLOW = 1, 1 << 2
"""Of seccomp(2). SPEC_ALLOW: without the slower mode of the processor for untrusted code."""
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, TYPE_MASK = 1, 2, 3, 0xF
IPPROTO_TCP = 6
MSG_FASTOPEN = 0x20000000
CLONE_NEWCGROUP = 0x02000000
X32 = 0x40000000
"""From this number on, calls of x86-64 are those of the x32 ABI."""
IO_URING = (425, 426, 427)
CLONE3 = 435
"""Numbers that all architectures share."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Of an ABI's system calls. Example: ABIS["x86_64"]["x86_64"].socket"""

    audit: int
    """AUDIT_ARCH of the ABI."""
    socket: int
    sendto: int
    sendmsg: int
    sendmmsg: int
    keys: tuple[int, int, int]
    """add_key, request_key, keyctl."""
    unshare: int
    clone: int
    multiplexed: int | None = None
    """socketcall, whose arguments are in memory; programs do without."""


_X86_64 = Numbers(0xC000003E, 41, 44, 46, 307, (248, 249, 250), 272, 56)
_I386 = Numbers(0x40000003, 359, 369, 370, 345, (286, 287, 288), 310, 120, 102)
_AARCH64 = Numbers(0xC00000B7, 198, 206, 211, 269, (217, 218, 219), 97, 220)
_ARM = Numbers(0x40000028, 281, 290, 296, 374, (309, 310, 311), 337, 120)
ABIS: Mapping[str, tuple[Numbers, ...]] = {
    "x86_64": (_X86_64, _I386),
    "aarch64": (_AARCH64, _ARM),
}
"""Machine → the ABIs of the programs that it runs, its own first."""

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Why this machine cannot refuse system calls; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"refusing system calls needs Linux, and this is {sys.platform}"
    if (machine := os.uname().machine) not in ABIS:
        return f"the system calls of {machine} are not known here; those of {', '.join(ABIS)} are"
    if _libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        return "this kernel has no seccomp"
    return None


def refuse_calls() -> None:
    """Applies the filter to this process, which must have CAP_SYS_ADMIN in its user namespace, and
    to its descendants.

    Raises:
        OSError: the kernel refuses.
    """
    code = _filter(ABIS[os.uname().machine])
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    if _libc.syscall(_SECCOMP[os.uname().machine], SET_MODE_FILTER, SPEC_ALLOW, program) == 0:
        return
    number = ctypes.get_errno()
    raise OSError(number, f"cannot refuse system calls: {os.strerror(number)}")


_SECCOMP = {"x86_64": 317, "aarch64": 277}

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _AT_LEAST, _HAS_BITS = 0x15, 0x35, 0x45
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ABI_AT, _ARGUMENTS_AT = 0, 4, 16
"""Where the kernel puts what a program of the filter loads."""


def _filter(abis: tuple[Numbers, ...]) -> bytes:
    """The program: a block for each ABI. Calls of an ABI that it does not know fail."""
    return b"".join(_of_abi(each) for each in abis) + _fail(errno.ENOSYS)


def _of_abi(numbers: Numbers) -> bytes:
    absent = [*IO_URING, *numbers.keys, CLONE3]
    if numbers.multiplexed is not None:
        absent.append(numbers.multiplexed)
    block = _load(_NUMBER_AT)
    block += _when(_AT_LEAST, X32, _fail(errno.ENOSYS))
    block += b"".join(_when(_EQUAL, number, _fail(errno.ENOSYS)) for number in absent)
    block += _when(_EQUAL, numbers.socket, _sockets())
    for number, at in ((numbers.sendto, 3), (numbers.sendmsg, 2), (numbers.sendmmsg, 3)):
        refused = _when(_HAS_BITS, MSG_FASTOPEN, _fail(errno.EOPNOTSUPP))
        block += _when(_EQUAL, number, _load(_argument(at)) + refused + _ALLOWED)
    for number in (numbers.unshare, numbers.clone):
        refused = _when(_HAS_BITS, CLONE_NEWCGROUP, _fail(errno.EINVAL))
        block += _when(_EQUAL, number, _load(_argument(0)) + refused + _ALLOWED)
    return _load(_ABI_AT) + _when(_EQUAL, numbers.audit, block + _ALLOWED)


def _sockets() -> bytes:
    """Unix, netlink and IP sockets alone, and of IP no stream but TCP. Raw ones need a right that
    an agent does not have outside of its own namespaces."""
    block = _load(_argument(0))
    for family in (AF_UNIX, AF_NETLINK):
        block += _when(_EQUAL, family, _ALLOWED)
    kind = _load(_argument(1)) + _masked(TYPE_MASK)
    tcp = _load(_argument(2)) + b"".join(
        _when(_EQUAL, protocol, _ALLOWED) for protocol in (0, IPPROTO_TCP)
    )
    kind += _when(_EQUAL, SOCK_STREAM, tcp + _fail(errno.EPROTONOSUPPORT))
    for each in (SOCK_DGRAM, SOCK_RAW):
        kind += _when(_EQUAL, each, _ALLOWED)
    kind += _fail(errno.ESOCKTNOSUPPORT)
    for family in (AF_INET, AF_INET6):
        block += _when(_EQUAL, family, kind)
    return block + _fail(errno.EAFNOSUPPORT)


def _argument(number: int) -> int:
    """Where the lower half of an argument is, on little-endian machines; no flag is above it."""
    return _ARGUMENTS_AT + 8 * number


def _instruction(code: int, value: int, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, 0, otherwise, value)


def _load(at: int) -> bytes:
    return _instruction(_LOAD, at)


def _masked(bits: int) -> bytes:
    return _instruction(_AND, bits)


def _fail(code: int) -> bytes:
    return _instruction(_RETURN, _FAIL | code)


_ALLOWED = _instruction(_RETURN, _ALLOW)


def _when(test: int, value: int, block: bytes) -> bytes:
    """The block if the test holds. A jump is at most 255 instructions, so that a longer block is
    reached by one without a condition."""
    count = len(block) // 8
    if count <= 255:
        return _instruction(test, value, count) + block
    jump = struct.pack("HBBI", 0x05, 0, 0, count)
    return struct.pack("HBBI", test, 1, 0, value) + jump + block
