"""The start of a process: descriptors, launcher and hooks beyond its spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from msgspec import Struct

PROXY = ("127.0.0.1", 3128)
"""The address of the proxy inside the network of a sandboxed process."""
CERTIFICATE_VARIABLES = (
    *("CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"),
)
"""The variables that name a file of certificates to programs. Kiwi sets them; no item may."""


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
