"""The seccomp filter, executed by a small BPF interpreter."""

from __future__ import annotations

from errno import EAFNOSUPPORT, ENOSYS, EPERM
from struct import iter_unpack

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kiwi_mcp.sandbox.seccomp import DENIED, LAST_KNOWN, Machine, filter_program, machine

ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NAMES = ("x86_64", "aarch64")


def judge(program: bytes, audit: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Run the filter on one call and return its answer."""
    words = {0: number & 0xFFFFFFFF, 4: audit}
    for index, argument in enumerate((*arguments, *[0] * (6 - len(arguments)))):
        words[16 + 8 * index] = argument & 0xFFFFFFFF
        words[20 + 8 * index] = argument >> 32 & 0xFFFFFFFF
    instructions: list[tuple[int, int, int, int]] = [*iter_unpack("=HBBI", program)]
    at, accumulator = 0, 0
    while True:
        code, yes, no, value = instructions[at]
        at += 1
        match code:
            case 0x20:
                accumulator = words[value]
            case 0x15:
                at += yes if accumulator == value else no
            case 0x25:
                at += yes if accumulator > value else no
            case 0x45:
                at += yes if accumulator & value else no
            case 0x06:
                return value
            case _:
                raise AssertionError(f"no such instruction: {code:#x}")


@pytest.fixture(params=NAMES)
def kind(request: pytest.FixtureRequest) -> tuple[bytes, Machine]:
    found = machine(request.param)
    assert found is not None
    return filter_program(request.param), found


def test_an_architecture_without_a_table_has_no_filter() -> None:
    assert machine("riscv64") is None
    assert all(machine(name) is not None for name in NAMES)


def test_calls_that_no_tool_needs_are_refused(kind: tuple[bytes, Machine]) -> None:
    program, target = kind
    for name in DENIED:
        if name in target.numbers:
            assert judge(program, target.audit, target.numbers[name]) == ERROR | EPERM, name


def test_calls_of_another_architecture_kill_the_process(kind: tuple[bytes, Machine]) -> None:
    program, target = kind
    assert judge(program, 0x40000003, 1) == KILL
    if target.foreign_bit:
        assert judge(program, target.audit, target.foreign_bit | 1) == KILL


@given(some.integers(LAST_KNOWN + 1, 0x3FFFFFFF), some.sampled_from(NAMES))
def test_unknown_calls_are_absent(number: int, name: str) -> None:
    target = machine(name)
    assert target is not None
    assert judge(filter_program(name), target.audit, number) == ERROR | ENOSYS


@given(some.integers(0, LAST_KNOWN), some.sampled_from(NAMES))
def test_every_other_call_is_allowed(number: int, name: str) -> None:
    target = machine(name)
    assert target is not None
    if number not in target.numbers.values():
        assert judge(filter_program(name), target.audit, number) == ALLOW


@given(some.integers(0, 0xFFFFFFFF))
def test_a_process_is_created_without_new_namespaces(flags: int) -> None:
    target = machine("x86_64")
    assert target is not None
    answer = judge(filter_program("x86_64"), target.audit, target.numbers["clone"], (flags,))
    assert answer == (ERROR | EPERM if flags & 0x7E020000 else ALLOW)


@given(some.integers(0, 64), some.sets(some.integers(1, 50), max_size=4))
def test_only_named_socket_families_are_created(family: int, allowed: set[int]) -> None:
    target = machine("x86_64")
    assert target is not None
    program = filter_program("x86_64", families=tuple(sorted(allowed)))
    answer = judge(program, target.audit, target.numbers["socket"], (family, 1, 0))
    assert answer == (ALLOW if family in allowed else ERROR | EAFNOSUPPORT)


@given(some.integers(0, 0o7777), some.booleans())
def test_no_file_gets_a_setuid_mode(mode: int, is_made: bool) -> None:
    target = machine("x86_64")
    assert target is not None
    program, numbers = filter_program("x86_64"), target.numbers
    wanted = ERROR | EPERM if mode & 0o6000 else ALLOW
    assert judge(program, target.audit, numbers["chmod"], (1, mode)) == wanted
    assert judge(program, target.audit, numbers["fchmodat2"], (1, 1, mode)) == wanted
    opened = judge(program, target.audit, numbers["openat"], (1, 1, 0o101 if is_made else 1, mode))
    assert opened == (wanted if is_made else ALLOW)


def test_additional_calls_can_be_refused() -> None:
    target = machine("x86_64")
    assert target is not None
    number = target.numbers["memfd_create"]
    assert judge(filter_program("x86_64"), target.audit, number) == ALLOW
    assert judge(filter_program("x86_64", denied=("memfd_create",)), target.audit, number) == ERROR | EPERM


def test_typing_into_a_terminal_is_refused(kind: tuple[bytes, Machine]) -> None:
    program, target = kind
    for request, wanted in ((0x5412, ERROR | EPERM), (0x541C, ERROR | EPERM), (0x5413, ALLOW)):
        assert judge(program, target.audit, target.numbers["ioctl"], (0, request)) == wanted
        assert judge(program, target.audit, target.numbers["ioctl"], (0, request | 1 << 32)) == wanted
