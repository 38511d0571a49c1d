"""The filter of system calls as container engines read it: the same refusals as those of `seccomp`, in JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from errno import EAFNOSUPPORT, ENOSYS, EPERM

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.sandbox.seccomp import AF_UNIX, MAKES_FILE, MODES, NAMESPACES, OPENS, SETS_ID, TYPES_INTO_TERMINAL
from kiwi_mcp.sandbox.syscalls import ABSENT, DENIED

_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}


def profile(machine_name: str, denied: Iterable[str] = ()) -> JsonObject:
    """Return the filter for a process without network; what calls the kernel by another table is killed.

    Calls that are newer than the engine's own library have no name there, so that they are left to the rights that the
    process does not have.
    """
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": [_ARCHITECTURES[machine_name]],
        "syscalls": [
            _refused((*DENIED, *denied), EPERM),
            _refused(ABSENT, ENOSYS),
            _refused(("socket",), EAFNOSUPPORT),
            _refused(("socketpair",), EAFNOSUPPORT, _argument(0, "SCMP_CMP_NE", AF_UNIX)),
            *(_refused(("ioctl",), EPERM, _argument(1, "SCMP_CMP_EQ", request)) for request in TYPES_INTO_TERMINAL),
            *(_refused(("clone",), EPERM, _has(0, bit)) for bit in _bits(NAMESPACES)),
            *(_refused((name,), EPERM, _has(mode, bit)) for name, mode in MODES.items() for bit in _bits(SETS_ID)),
            *(
                _refused((name,), EPERM, _has(flags, making), _has(flags + 1, bit))
                for name, flags in OPENS.items()
                for making in _bits(MAKES_FILE)
                for bit in _bits(SETS_ID)
            ),
        ],
    }


def _refused(names: Iterable[str], error: int, *arguments: JsonObject) -> JsonObject:
    return {"names": [*names], "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": [*arguments]}


def _has(index: int, bit: int) -> JsonObject:
    """Whether an argument has a bit."""
    return {**_argument(index, "SCMP_CMP_MASKED_EQ", bit), "valueTwo": bit}


def _argument(index: int, test: str, value: int) -> JsonObject:
    return {"index": index, "op": test, "value": value}


def _bits(mask: int) -> Iterator[int]:
    return (1 << place for place in range(mask.bit_length()) if mask >> place & 1)
