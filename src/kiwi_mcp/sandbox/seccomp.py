"""The seccomp filter program and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from errno import EAFNOSUPPORT, ENOSYS, EPERM
from functools import cache
from stat import S_ISGID, S_ISUID
from struct import pack

from msgspec import Struct

LAST_KNOWN = 462
"""The newest call that was looked at; what the kernel has learned since is absent inside a sandbox."""

# Name, number on x86_64, number on aarch64.
_DENIED = """
acct 163 89
add_key 248 217
adjtimex 159 171
bpf 321 280
chroot 161 51
clock_adjtime 305 266
clock_settime 227 112
delete_module 176 106
fanotify_init 300 262
finit_module 313 273
fsconfig 431 431
fsmount 432 432
fsopen 430 430
fspick 433 433
init_module 175 105
io_uring_enter 426 426
io_uring_register 427 427
io_uring_setup 425 425
ioperm 173 -
iopl 172 -
kcmp 312 272
kexec_file_load 320 294
kexec_load 246 104
keyctl 250 219
listmount 458 458
lookup_dcookie 212 18
memfd_secret 447 447
migrate_pages 256 238
modify_ldt 154 -
mount 165 40
mount_setattr 442 442
move_mount 429 429
move_pages 279 239
name_to_handle_at 303 264
nfsservctl 180 42
open_by_handle_at 304 265
open_tree 428 428
perf_event_open 298 241
pidfd_getfd 438 438
pivot_root 155 41
process_madvise 440 440
process_vm_readv 310 270
process_vm_writev 311 271
ptrace 101 117
quotactl 179 60
quotactl_fd 443 443
reboot 169 142
request_key 249 218
setdomainname 171 162
sethostname 170 161
setns 308 268
settimeofday 164 170
statmount 457 457
swapoff 168 225
swapon 167 224
sysctl 156 -
sysfs 139 -
syslog 103 116
umount2 166 39
unshare 272 97
uselib 134 -
userfaultfd 323 282
ustat 136 -
vhangup 153 58
"""
_JUDGED = """
chmod 90 -
clone 56 220
clone3 435 435
creat 85 -
fchmod 91 52
fchmodat 268 53
fchmodat2 452 452
ioctl 16 29
memfd_create 319 279
mknod 133 -
mknodat 259 33
open 2 -
openat 257 56
openat2 437 437
sched_setaffinity 203 122
shmget 29 194
socket 41 198
socketpair 53 199
"""

DENIED = tuple(line.split()[0] for line in _DENIED.split("\n") if line)
"""Calls that no tool needs: they reach other processes, the mount table, the clock, keys or the kernel itself."""

ABSENT = ("clone3", "openat2")
"""Calls with arguments that a filter cannot see. Programs work without them if the kernel does not have them."""
_LOAD, _IF_EQUAL, _IF_GREATER, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _AUDIT, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_DENY = _ERROR | EPERM
NAMESPACES = 0x7E020000
"""Every flag of `clone` that makes a namespace: user, pid, net, ipc, uts, cgroup and mount."""
TYPES_INTO_TERMINAL = (0x5412, 0x541C)
"""Requests that type into the terminal of the parent process: TIOCSTI and TIOCLINUX."""
AF_UNIX = 1
SETS_ID = S_ISUID | S_ISGID
MAKES_FILE = 0o100 | 0o20000000
"""O_CREAT and O_TMPFILE, without which the mode of `open` means nothing."""
MODES = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
"""Calls that set the mode of a file, and which of their arguments it is."""
OPENS = {"open": 1, "openat": 2}
"""Calls that may make a file, and which of their arguments says so; the mode comes after it."""
_Instruction = tuple[int, int, int, int]
_Block = tuple[_Instruction, ...]
_FEW = 6


class Machine(Struct, frozen=True):
    """How a kind of machine calls its kernel."""

    audit: int
    """The number by which a filter recognises it."""
    numbers: Mapping[str, int]
    foreign_bit: int = 0
    """A bit in the number of calls that follow another convention, which is refused altogether."""


def machine(name: str) -> Machine | None:
    """Return how a kind of machine, as `uname` names it, calls its kernel; None for one without a table."""
    match name:
        case "x86_64":
            return Machine(0xC000003E, _column(1), foreign_bit=0x40000000)
        case "aarch64":
            return Machine(0xC00000B7, _column(2))
        case _:
            return None


def _column(index: int) -> Mapping[str, int]:
    rows = (line.split() for line in (_DENIED + _JUDGED).split("\n") if line)
    return {row[0]: int(row[index]) for row in rows if row[index] != "-"}


@cache
def filter_program(machine_name: str, *, families: tuple[int, ...] = (), denied: tuple[str, ...] = ()) -> bytes:
    """Return the filter as the kernel takes it.

    `families` are the kinds of sockets that may be made: a network namespace does not cover every kind.
    """
    target = machine(machine_name)
    if target is None:
        raise ValueError(f"no table of system calls for {machine_name}")
    judged: dict[str, Iterable[_Instruction]] = {
        **dict.fromkeys((*DENIED, *denied), ((_RETURN, 0, 0, _DENY),)),
        **dict.fromkeys(ABSENT, ((_RETURN, 0, 0, _ERROR | ENOSYS),)),
        **_by_arguments(families),
    }
    numbered = {target.numbers[name]: tuple(block) for name, block in judged.items() if name in target.numbers}
    program = (*_convention(target), *_searched(sorted(numbered.items())))
    return b"".join(pack("=HBBI", *instruction) for instruction in program)


def _convention(target: Machine) -> Iterator[_Instruction]:
    """Kill whatever calls the kernel by another table than the one that was looked at."""
    yield _LOAD, 0, 0, _AUDIT
    yield _IF_EQUAL, 1, 0, target.audit
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    if target.foreign_bit:
        yield _IF_ANY_BIT, 0, 1, target.foreign_bit
        yield _RETURN, 0, 0, _KILL
    yield _IF_GREATER, 0, 1, LAST_KNOWN
    yield _RETURN, 0, 0, _ERROR | ENOSYS


def _searched(calls: Sequence[tuple[int, _Block]]) -> Sequence[_Instruction]:
    """Judge a call by the block of its number, which is found by halves; any other number is allowed.

    The kernel tries every number when it is given a filter, so that one long list costs each start some hundred µs.
    """
    if len(calls) <= _FEW:
        return (*_listed(calls),)
    half = len(calls) // 2
    lower, upper = _searched(calls[:half]), _searched(calls[half:])
    return ((_IF_GREATER, len(lower), 0, calls[half - 1][0]), *lower, *upper)


def _listed(calls: Sequence[tuple[int, _Block]]) -> Iterator[_Instruction]:
    """Compare with one number after the other, and jump to its block; the same block stands there once."""
    places: dict[_Block, int] = {}
    after = 1  # behind the answer to what is none of them
    for _, block in calls:
        if block not in places:
            places[block] = after
            after += len(block)
    for place, (number, block) in enumerate(calls):
        yield _IF_EQUAL, len(calls) - 1 - place + places[block], 0, number
    yield _RETURN, 0, 0, _ALLOW
    for block in places:
        yield from block


def _by_arguments(families: tuple[int, ...]) -> Mapping[str, Iterable[_Instruction]]:
    """Return how calls are judged by their arguments; every path through a block ends in an answer."""
    return {
        "clone": _unless_any_bit(0, NAMESPACES),
        "ioctl": _compared(1, TYPES_INTO_TERMINAL, equal=_DENY, other=_ALLOW),
        "socket": _compared(0, families, equal=_ALLOW, other=_ERROR | EAFNOSUPPORT),
        "socketpair": _compared(0, (AF_UNIX,), equal=_ALLOW, other=_ERROR | EAFNOSUPPORT),
        # A setuid file would give the rights of its owner to any user who runs it outside of the sandbox.
        **{name: _unless_any_bit(mode, SETS_ID) for name, mode in MODES.items()},
        **{name: _unless_both(flags, MAKES_FILE, flags + 1, SETS_ID) for name, flags in OPENS.items()},
    }


def _unless_any_bit(argument: int, bits: int) -> Iterator[_Instruction]:
    yield _argument(argument)
    yield _IF_ANY_BIT, 0, 1, bits
    yield _RETURN, 0, 0, _DENY
    yield _RETURN, 0, 0, _ALLOW


def _unless_both(first: int, first_bits: int, second: int, second_bits: int) -> Iterator[_Instruction]:
    yield _argument(first)
    yield _IF_ANY_BIT, 1, 0, first_bits
    yield _RETURN, 0, 0, _ALLOW
    yield from _unless_any_bit(second, second_bits)


def _compared(argument: int, values: Sequence[int], *, equal: int, other: int) -> Iterator[_Instruction]:
    yield _argument(argument)
    for place, value in enumerate(values):
        yield _IF_EQUAL, len(values) - place, 0, value
    yield _RETURN, 0, 0, other
    yield _RETURN, 0, 0, equal


def _argument(index: int) -> _Instruction:
    # The lower half: these arguments have 32 bits, and the flags of `clone` that matter lie in it.
    return _LOAD, 0, 0, _FIRST_ARGUMENT + 8 * index
