"""The filter of system calls: a program for the kernel's packet-filter machine, written instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from errno import EAFNOSUPPORT, ENOSYS, EPERM
from functools import cache
from stat import S_ISGID, S_ISUID
from struct import pack

from kiwi_mcp.sandbox.syscalls import ABSENT, DENIED, LAST_KNOWN, Machine, machine

_LOAD, _IF_EQUAL, _IF_GREATER, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _AUDIT, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_DENY = _ERROR | EPERM
_NAMESPACES = 0x7E020000
"""Every flag of `clone` that makes a namespace: user, pid, net, ipc, uts, cgroup and mount."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
"""Requests that type into the terminal of whoever started the process."""
_AF_UNIX = 1
_SETS_ID = S_ISUID | S_ISGID
_MAKES_FILE = 0o100 | 0o20000000
"""O_CREAT and O_TMPFILE, without which the mode of `open` means nothing."""

_Instruction = tuple[int, int, int, int]


def is_supported(machine_name: str) -> bool:
    """Whether a kind of machine, as `uname` names it, has a filter."""
    return machine(machine_name) is not None


@cache
def filter_program(machine_name: str, *, families: tuple[int, ...] = (), denied: tuple[str, ...] = ()) -> bytes:
    """Return the filter as the kernel takes it.

    `families` are the kinds of sockets that may be made; a namespace of its own does not cover every kind. `denied`
    are further calls to refuse.
    """
    target = machine(machine_name)
    if target is None:
        raise ValueError(f"no table of system calls for {machine_name}")
    program = (
        *_convention(target),
        *_refused((*DENIED, *denied), target, _DENY),
        *_refused(ABSENT, target, _ERROR | ENOSYS),
        *_by_arguments(target, families),
        (_RETURN, 0, 0, _ALLOW),
    )
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


def _refused(names: Sequence[str], target: Machine, answer: int) -> Iterator[_Instruction]:
    """Answer calls by number alone: each compares and, where it is equal, jumps to the one answer at the end."""
    numbers = sorted({target.numbers[name] for name in names if name in target.numbers})
    for place, number in enumerate(numbers):
        is_last = place == len(numbers) - 1
        yield _IF_EQUAL, len(numbers) - 1 - place, int(is_last), number
    yield _RETURN, 0, 0, answer


def _by_arguments(target: Machine, families: tuple[int, ...]) -> Iterator[_Instruction]:
    yield from _call(target, "clone", _unless_any_bit(0, _NAMESPACES))
    yield from _call(target, "ioctl", _unless_equal(1, (_TIOCSTI, _TIOCLINUX)))
    yield from _call(target, "socket", _only(0, families))
    yield from _call(target, "socketpair", _only(0, (_AF_UNIX,)))
    # A file that carries its owner's rights would carry them for whoever runs it outside.
    for name, mode in {
        "chmod": 1,
        "fchmod": 1,
        "fchmodat": 2,
        "fchmodat2": 2,
        "creat": 1,
        "mknod": 1,
        "mknodat": 2,
    }.items():
        yield from _call(target, name, _unless_any_bit(mode, _SETS_ID))
    for name, flags in {"open": 1, "openat": 2}.items():
        yield from _call(target, name, _unless_both(flags, _MAKES_FILE, flags + 1, _SETS_ID))


def _call(target: Machine, name: str, judged: Iterable[_Instruction]) -> Iterator[_Instruction]:
    """Judge one call by its arguments; every path through `judged` ends in an answer."""
    if name in target.numbers:
        block = list(judged)
        yield _IF_EQUAL, 0, len(block), target.numbers[name]
        yield from block


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


def _unless_equal(argument: int, values: Sequence[int]) -> Iterator[_Instruction]:
    yield _argument(argument)
    for place, value in enumerate(values):
        yield _IF_EQUAL, len(values) - place, 0, value
    yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, _DENY


def _only(argument: int, values: Sequence[int]) -> Iterator[_Instruction]:
    yield _argument(argument)
    for place, value in enumerate(values):
        yield _IF_EQUAL, len(values) - place, 0, value
    yield _RETURN, 0, 0, _ERROR | EAFNOSUPPORT
    yield _RETURN, 0, 0, _ALLOW


def _argument(index: int) -> _Instruction:
    # The lower half: these arguments have 32 bits, and the flags of `clone` that matter lie in it.
    return _LOAD, 0, 0, _FIRST_ARGUMENT + 8 * index
