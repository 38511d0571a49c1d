"""Isolation: how strictly a process is held, what it is left with, and what its start takes beyond its spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from kiwi_mcp.domain.json import JsonObject

Level = Literal["trusted", "standard", "sandboxed", "restricted"]
LEVELS: tuple[Level, ...] = ("trusted", "standard", "sandboxed", "restricted")
"""The levels, from the laxest to the strictest."""

Provenance = Literal[
    "builtin",
    "owner_pinned",
    "owner_relaxed",
    "owner_written",
    "model_written",
    "known_publisher",
    "mcp_server",
    "unknown",
]
"""Where code comes from, as far as that has been shown; it sets the least level that the code is held by."""


def strictest(levels: Iterable[str]) -> Level:
    """Return the strictest of some levels; a word that is no level counts as the strictest, and so does nothing."""
    ranks: Mapping[str, int] = {level: rank for rank, level in enumerate(LEVELS)}
    top = len(LEVELS) - 1
    return LEVELS[max((ranks.get(level, top) for level in levels), default=top)]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a confined process and all it starts may take."""

    memory_bytes: int = 1_073_741_824
    """Held by the kernel for all processes together where the level asks for it, else for each of them."""
    cpus: float = 1.0
    """How many processors' time it may have, where the level asks for it."""
    cpu_seconds: int = 600
    """For each process."""
    pids: int = 256
    """Processes and threads together."""
    open_files: int = 1_024
    file_bytes: int = 1_073_741_824
    """The largest file that it may write."""
    tmp_bytes: int = 268_435_456
    """What its home and temporary folder may hold together."""
    workspace_bytes: int = 2_147_483_648
    """What it may add to the folders that it is given to write to."""
    workspace_files: int = 50_000
    """How many files it may make or change there."""

    def to_json(self) -> JsonObject:
        """Return the limits as records show them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Jail:
    """What a process is left with: a level, the paths it may see and change, the hosts it may reach, and limits.

    Paths are absolute and free of links: what they name is what is given, never what a link there leads to.
    """

    level: Level
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """What lies below a path that is given and is kept from it all the same."""
    hosts: tuple[str, ...] = ()
    """The hosts that it reaches, through a proxy that looks at every connection; none where this is empty.

    `name`, `name:port`, `*.name`, `*.name:port` or an address; without a port, those of the web: 80 and 443.
    """
    denied_hosts: tuple[str, ...] = ()
    """The hosts that it does not reach, whatever else allows them."""
    private_hosts: tuple[str, ...] = ()
    """Hosts that the owner granted although their addresses are not public; the others are reached at public ones."""
    limits: Limits = field(default_factory=Limits)
    closed: tuple[str, ...] = ()
    """Folders that anybody's files may be in: a program that lies there brings nothing of them but itself.

    It follows from where the process is started, so it is no part of what is shown.
    """
    trusted: tuple[str, ...] = ()
    """Folders that programs may bring all the same, because Kiwi made them."""
    provenance: Provenance = "unknown"
    """Where the least trusted of what runs in it comes from, which is why it is as strict as that."""

    def to_json(self) -> JsonObject:
        """Return the jail as plans and records show it."""
        return {
            "level": self.level,
            "readable": list(self.readable),
            "writable": list(self.writable),
            "hidden": list(self.hidden),
            "hosts": list(self.hosts),
            "denied_hosts": list(self.denied_hosts),
            "private_hosts": list(self.private_hosts),
            "limits": self.limits.to_json(),
            "provenance": self.provenance,
        }


PROXY = ("127.0.0.1", 3128)
"""Where the proxy of a confined process listens, inside of its own network."""


def no_entry(_: int) -> None:
    """Do nothing with a process that was started, because nothing has to be done."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Where a confined process waits before it begins, until it has been given its way out."""

    told: int
    """A descriptor from which its launcher tells, as JSON, which process is the first inside (`child-pid`)."""
    open: Callable[[], None]
    """Lets it begin."""


class Started(Protocol):
    """A process that has been started."""

    @property
    def pid(self) -> int:
        """Its number."""


T = TypeVar("T", bound=Started)


class Start(Protocol):
    """Starts a process by calling what does so: as whom, and seeing which files, is up to it."""

    def __call__(self, spawn: Callable[[], T], /) -> T:
        """Start it and return it."""


def start_here(spawn: Callable[[], T], /) -> T:
    """Start a process as Kiwi itself is."""
    return spawn()


@dataclass(frozen=True, slots=True)
class Handover:
    """What the start of a process takes beyond its spec."""

    descriptors: tuple[int, ...] = ()
    """Open descriptors that it is given under the same numbers."""
    owner: int | None = None
    """The user that its pipes must belong to, where it is not the one who starts it."""
    enter: Callable[[int], None] = no_entry
    """Called once with the number of the process when it has been started; it does not run on before."""
    gate: Gate | None = None
    """Where it waits for its way to the network; None where it gets none."""
    start: Start = start_here
    """What it is started through."""
    makes_session: bool = False
    """Whether what is started makes a session of its own for the process; two of them would take twice the time."""

    @property
    def group(self) -> int | None:
        """The process group that its start makes, as a number for `Popen`; None where that comes with a session."""
        return 0 if self.makes_session else None


NOTHING = Handover()
"""What the start of a process takes that is not confined."""
