"""The filter of system calls: a program for the kernel's packet-filter machine, written instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from errno import EAFNOSUPPORT, ENOSYS, EPERM
from functools import cache
from stat import S_ISGID, S_ISUID
from struct import pack

from kiwi_mcp.sandbox.syscalls import ABSENT, DENIED, LAST_KNOWN, Machine, machine

_LOAD, _IF_EQUAL, _IF_GREATER, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _AUDIT, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_DENY = _ERROR | EPERM
NAMESPACES = 0x7E020000
"""Every flag of `clone` that makes a namespace: user, pid, net, ipc, uts, cgroup and mount."""
TYPES_INTO_TERMINAL = (0x5412, 0x541C)
"""Requests that type into the terminal of whoever started the process: TIOCSTI and TIOCLINUX."""
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
        "ioctl": _unless_equal(1, TYPES_INTO_TERMINAL),
        "socket": _only(0, families),
        "socketpair": _only(0, (AF_UNIX,)),
        # A file that carries its owner's rights would carry them for whoever runs it outside.
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
