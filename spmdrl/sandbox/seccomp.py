"""A seccomp filter: the system calls that a program in the sandbox may not make.

This is a list of forbidden calls, not of allowed ones, because programs need hundreds of calls. It
does not restrict access to files. It forbids the network (all sockets but pairs), shared memory
that no limit counts, tracing, ways to signal other than kill, mounts, new namespaces, and the parts
of the kernel that most exploits use. A forbidden call fails with "operation not permitted".
"""

from __future__ import annotations

import platform
import struct
import sys

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {  # name: (x86_64, aarch64)
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "socket": (41, 198),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "personality": (135, 92),
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
}
_KILL = (62, 129)
_TKILL = (200, 130)
_TGKILL = (234, 131)
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_FCNTL = (72, 25)
_IOCTL = (16, 29)
_PRLIMIT = (302, 261)
_NEW_NAMESPACES = 0x7E020000
# With these, a descriptor can signal any process of the same user.
_FCNTL_OWNER = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
_IOCTL_OWNER = (0x8901, 0x8902, 0x5412, 0x541C)  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX

_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_END_PROCESS = 0x80000000
_FAIL = 0x00050000
_EPERM = 1
_ENOSYS = 38


def seccomp_filter(*, has_own_pids: bool) -> bytes:
    """Return the filter as an array of `struct sock_filter`; b"" for an unknown processor.

    Args:
        has_own_pids: whether the program only sees its own processes. Otherwise the filter lets it
            signal only its own process group.
    """
    machine = platform.machine()
    if machine not in _ARCH or sys.byteorder != "little":
        return b""
    at = list(_ARCH).index(machine)
    code = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCH[machine]),
        (_RETURN, 0, 0, _END_PROCESS),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":  # forbid the x32 calls, which no program uses
        code += [(_AT_LEAST, 0, 1, 0x40000000), _fail(_ENOSYS)]
    numbers = [pair[at] for pair in _REFUSED.values()]
    if not has_own_pids:
        numbers += [_TKILL[at], _TGKILL[at]]
        code += _if_call(_KILL[at], argument=0, tests=[(_EQUAL, 1, 0, 0), _fail()])
    for number in numbers:
        code += [(_EQUAL, 0, 1, number), _fail()]
    # A filter cannot read the flags of clone3, which are behind a pointer. If it fails, libraries
    # use clone.
    code += [(_EQUAL, 0, 1, _CLONE3[at]), _fail(_ENOSYS)]
    code += _if_call(_CLONE[at], argument=0, tests=[(_ANY_BIT, 0, 1, _NEW_NAMESPACES), _fail()])
    code += _if_call(_PRLIMIT[at], argument=0, tests=[(_EQUAL, 1, 0, 0), _fail()])
    for call, commands in ((_FCNTL, _FCNTL_OWNER), (_IOCTL, _IOCTL_OWNER)):
        tests = [part for c in commands for part in ((_EQUAL, 0, 1, c), _fail())]
        code += _if_call(call[at], argument=1, tests=tests)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *line) for line in code)


def _fail(errno: int = _EPERM) -> tuple[int, int, int, int]:
    return _RETURN, 0, 0, _FAIL | errno


def _if_call(number: int, *, argument: int, tests: list[tuple]) -> list[tuple]:
    """Return code that tests the low 32 bits of one argument of a call, then reloads its number."""
    load = (_LOAD, 0, 0, 16 + 8 * argument)
    return [(_EQUAL, 0, len(tests) + 2, number), load, *tests, (_LOAD, 0, 0, 0)]
