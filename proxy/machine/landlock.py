"""Refuses connections to TCP ports and to abstract Unix sockets, by Landlock: the rule set for a
process that restricts itself. Nor can it take such a port while nobody has it.

The kernel applies a rule set to the process that asks for it and to its descendants, and none of
them can undo it. Uses only the standard library, so that a program that starts agents can load this
file alone. Needs Linux 6.7 or later, built with Landlock.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable
from typing import Any

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of Landlock's system calls, the same on every architecture."""
PORTS_ABI = 4
"""The first Landlock version that can refuse ports (Linux 6.7)."""
SCOPES_ABI = 6
"""The first Landlock version that can refuse abstract sockets of other processes (Linux 6.12)."""
NET_PORT, BIND_TCP, CONNECT_TCP = 2, 1 << 0, 1 << 1
SCOPE_ABSTRACT_SOCKETS = 1 << 0
PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Why this machine cannot refuse ports; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"refusing ports needs Linux, and this is {sys.platform}"
    version = _version()
    if version >= PORTS_ABI:
        return None
    found = f"this kernel has Landlock {version}" if version > 0 else "this kernel has no Landlock"
    return f"refusing ports needs Landlock {PORTS_ABI} (Linux 6.7), and {found}"


def missing_scopes() -> str | None:
    """Why this machine cannot refuse abstract sockets; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"refusing abstract sockets needs Linux, and this is {sys.platform}"
    version = _version()
    if version >= SCOPES_ABI:
        return None
    found = f"this kernel has Landlock {version}" if version > 0 else "this kernel has no Landlock"
    return f"refusing abstract sockets needs Landlock {SCOPES_ABI} (Linux 6.12), and {found}"


def _version() -> int:
    return int(_libc.syscall(CREATE_RULESET, None, 0, 1))


def refuse_ports(ports: Iterable[int]) -> int:
    """A descriptor of a rule set that refuses TCP connections to these ports, at every address, and
    servers there, and where the kernel can, connections to abstract sockets of processes without
    the rule set; -1 if there is nothing to refuse. Takes 0.1 s, because Landlock needs one rule per
    allowed port.

    Raises:
        OSError: the kernel has no Landlock, or one older than Linux 6.7.
    """
    refused, scoped = set(ports), missing_scopes() is None
    if not refused and not scoped:
        return -1
    handled = BIND_TCP | CONNECT_TCP if refused else 0
    scopes = (SCOPE_ABSTRACT_SOCKETS,) if scoped else ()
    attributes = struct.pack(f"{2 + len(scopes)}Q", 0, handled, *scopes)
    ruleset = _syscall(CREATE_RULESET, attributes, len(attributes), 0)
    os.set_inheritable(ruleset, False)
    if not refused:
        return ruleset
    rule = ctypes.create_string_buffer(16)
    address = ctypes.c_void_p(ctypes.addressof(rule))
    for port in range(1 << 16):
        if port not in refused:
            struct.pack_into("QQ", rule, 0, handled, port)
            _syscall(ADD_RULE, ruleset, NET_PORT, address, 0)
    return ruleset


def take_rules(ruleset: int) -> None:
    """Applies a rule set to this process and its descendants. Takes 20 ms.

    Raises:
        OSError: the kernel refuses.
    """
    # A process without CAP_SYS_ADMIN must renounce set-user-ID programs, which have no effect
    # behind a wall anyway.
    if os.geteuid() != 0 and _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _syscall(RESTRICT_SELF, ruleset, 0)


def _syscall(number: int, *args: Any) -> int:
    result = int(_libc.syscall(number, *args))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code or errno.EINVAL, os.strerror(code))
    return result
