"""Isolation: how strictly a process is isolated, what it may access, and what its start needs beyond its spec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol, TypeVar

from msgspec import Struct, field
from msgspec.structs import asdict

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
"""Where code comes from, as far as that is proved. It sets the minimum isolation level of the code."""
PROXY = ("127.0.0.1", 3128)
"""The address of the proxy inside the network of a sandboxed process."""
CERTIFICATE_VARIABLES = (
    *("CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"),
)
"""The variables that name a file of certificates to programs. Kiwi sets them; no item may."""


def strictest(levels: Iterable[str]) -> Level:
    """Return the strictest of some levels; an unknown level or none counts as the strictest."""
    ranks: Mapping[str, int] = {level: rank for rank, level in enumerate(LEVELS)}
    top = len(LEVELS) - 1
    return LEVELS[max((ranks.get(level, top) for level in levels), default=top)]


class ResourceLimits(Struct, frozen=True):
    """The resource limits of a sandboxed process and its children."""

    memory_bytes: int = 1_073_741_824
    """For all processes together if the level requires it, else for each process. The kernel enforces it."""
    cpus: float = 1.0
    """The number of processors it may use, if the level requires a limit."""
    cpu_seconds: int = 600
    """For each process."""
    pids: int = 256
    """Processes and threads together."""
    open_files: int = 1_024
    file_bytes: int = 1_073_741_824
    """The largest file that it may write."""
    tmp_bytes: int = 268_435_456
    """The size of its home and temporary folder together."""
    workspace_bytes: int = 2_147_483_648
    """The number of bytes it may add to its writable folders."""
    workspace_files: int = 50_000
    """The number of files it may create or change there."""

    def to_json(self) -> JsonObject:
        """Return the limits as records show them."""
        limits: JsonObject = asdict(self)
        return limits


class SandboxProfile(Struct, frozen=True):
    """What a process may access: a level, the paths it may read and change, the hosts it may reach, and limits.

    Paths are absolute and free of links: a grant covers the path itself, never the target of a link there.
    """

    level: Level
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Paths below a granted path that are still hidden from it."""
    hosts: tuple[str, ...] = ()
    """The hosts that it reaches, through a proxy that looks at every connection; none where this is empty.

    `name`, `name:port`, `*.name`, `*.name:port` or an address; without a port, those of the web: 80 and 443.
    """
    denied_hosts: tuple[str, ...] = ()
    """The hosts that it cannot reach, even if another rule allows them."""
    private_hosts: tuple[str, ...] = ()
    """Hosts that the owner granted although their addresses are not public; the others are reached at public ones."""
    has_sockets: bool = False
    """Whether its processes may make Unix sockets, as browsers do; no granted folder may contain one then."""
    scratch: str = ""
    """The writable folder that it shares with the other tools of its source; it is among `writable` too."""
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    git_copies: tuple[tuple[str, str], ...] = ()
    """The git folders at the top of writable folders, each with the copy that it sees and may change instead."""
    closed: tuple[str, ...] = ()
    """Folders with untrusted files. A program in them is readable, but not the files around it.

    It follows from where the process is started, so it is not part of the JSON form.
    """
    trusted: tuple[str, ...] = ()
    """Folders inside closed ones that programs may still use, because Kiwi made them."""
    provenance: Provenance = "unknown"
    """The origin of the least trusted code in it, which decides the level."""

    def to_json(self) -> JsonObject:
        """Return the profile as plans and records show it."""
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
            **({"unix_sockets": True} if self.has_sockets else {}),
        }


def no_entry(_: int) -> None:
    """Do nothing after the start of a process."""


class StartGate(Struct, frozen=True):
    """The gate at which a sandboxed process waits until its network is ready."""

    child_info: int
    """A descriptor on which the launcher writes, as JSON, the first process inside (`child-pid`)."""
    open: Callable[[], None]
    """Opens the gate."""


class Spawned(Protocol):
    """A process that has been started."""

    @property
    def pid(self) -> int:
        """Its number."""


class ProcessExit(Struct, frozen=True):
    """How a process ended and what it gave, without the values of its secrets."""

    exit_code: int | None
    """Its exit code; None where a signal ended it, or nothing yet."""
    stdout: bytes
    stderr: bytes
    stopped: str = ""
    """Why what watches the process stopped it, or would have stopped it; empty if it did not."""


T = TypeVar("T", bound=Spawned)


class Spawner(Protocol):
    """Starts a process; it decides the user and the visible files."""

    def __call__(self, spawn: Callable[[], T], /) -> T:
        """Start it and return it."""


def start_here(spawn: Callable[[], T], /) -> T:
    """Start a process as the user of Kiwi."""
    return spawn()


class Handover(Struct, frozen=True):
    """The start of a process beyond its spec."""

    descriptors: tuple[int, ...] = ()
    """Open descriptors that it is given under the same numbers."""
    owner: int | None = None
    """The user that its pipes must belong to, where it is not the one who starts it."""
    enter: Callable[[int], None] = no_entry
    """Called once with the process id after the start; the process waits until then."""
    gate: StartGate | None = None
    """The gate at which it waits for its network; None without a network."""
    start: Spawner = start_here
    """The function that starts it."""
    makes_session: bool = False
    """Whether the launcher creates a session for the process; a second one would cost twice the time."""
    first: Callable[[], int] | None = None
    """Returns the first process of the pid namespace that all of it runs in, 0 if it has not started."""

    @property
    def group(self) -> int | None:
        """The process group for `Popen`; None if the launcher creates a session."""
        return 0 if self.makes_session else None


NOTHING = Handover()
"""The start of a process without a sandbox."""
