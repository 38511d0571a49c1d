"""Port `Backend`, backend `none`, errors with remedies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeAlias

from msgspec import Struct, field

from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import Level, SandboxProfile
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.domain.process import Handover
from kiwi_mcp.sandbox.levels import meaning


class SandboxExit(Protocol):
    """How a process ended and what it said, as the primitive that ran it tells."""

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None where a signal ended it."""

    @property
    def stdout(self) -> bytes:
        """What it printed."""

    @property
    def stderr(self) -> bytes:
        """What it complained of."""

    @property
    def stopped(self) -> str:
        """Why the watch of its launch stopped it; empty if it did not."""


def began(_: SandboxExit) -> None:
    """Take it that a process without a launcher has begun: nothing stands between its start and itself."""


def never() -> int:
    """Return 0: a process without a CPU limit is never throttled."""
    return 0


class Launch(Struct, frozen=True):
    """A process that is ready to start, confined; it lasts as long as the block that gave it."""

    spec: ProcessSpec
    handover: Handover = field(default_factory=Handover)
    check: Callable[[SandboxExit], None] = began
    """Raises where it was not the process that failed but what should have confined it, so that nothing ran."""
    throttle_count: Callable[[], int] = never
    """Counts how often the kernel stopped its processes because their share of the processors was used up."""
    watch: Callable[[], str] | None = None
    """Says why its processes have to be stopped, an empty text while they may continue; None if the kernel stops them.

    It is called every 50 ms.
    """


class SelfTest(Struct, frozen=True):
    """A process that prints the name of each property that holds in its sandbox, within `spec.timeout`."""

    spec: ProcessSpec
    profile: SandboxProfile


class Backend(Protocol):
    """Turns a process into the same process, confined."""

    @property
    def name(self) -> str:
        """The word for it in the data, which is also the name of its file."""

    @property
    def limited_by(self) -> str:
        """What limits all processes of a tool together: `cgroup` or `watchdog`; empty if nothing does."""

    def obstacles(self) -> tuple[str, ...]:
        """Return what prevents this backend from working here, each with its remedy; empty if it may work."""

    def fingerprint(self) -> str:
        """Return the inputs of the self-test's result, besides the kernel and the user."""

    def self_test(self, secret: str) -> SelfTest | None:
        """Return the process that tests the backend here, or None; it must not be able to see the file `secret`."""

    def wrap(self, spec: ProcessSpec, profile: SandboxProfile) -> AbstractContextManager[Launch]:
        """Return the process confined; what was opened for it is closed when the block ends."""


Runner: TypeAlias = Callable[[Launch], Awaitable[SandboxExit]]
"""Runs a confined process to its end: what a primitive does, handed down, since only primitives start processes."""


class NoSandbox:
    """Gives a process as it came."""

    name = "none"
    limited_by = ""

    def obstacles(self) -> tuple[str, ...]:
        """Return nothing: it works everywhere."""
        return ()

    def fingerprint(self) -> str:
        """Return nothing: there is nothing to show."""
        return ""

    def self_test(self, secret: str) -> SelfTest | None:  # noqa: ARG002 - the port gives every backend the same arguments
        """Return None: what it provides, the primitive does, wherever it runs."""
        return None

    @contextmanager
    def wrap(self, spec: ProcessSpec, profile: SandboxProfile) -> Iterator[Launch]:  # noqa: ARG002 - as above
        """Yield the process unchanged."""
        yield Launch(spec)


_LAST = 400
_REMEDIES = {
    "No permissions to creat": "This system does not let ordinary users make user namespaces. On Ubuntu, give "
    "bubblewrap an AppArmor profile that allows `userns`; in a container, allow `clone` and `unshare` with "
    "CLONE_NEWUSER in its seccomp profile; on Debian, set `kernel.unprivileged_userns_clone=1`.",
    "nesting depth or": "The number of namespaces is limited here. Raise `user.max_user_namespaces` and its kin, or "
    "start Kiwi outside of the sandbox that it runs in.",
    "Can't mount proc": "Parts of /proc are masked here, as container engines do, so no new one can be mounted. Start "
    "the container with an unmasked /proc, or run Kiwi outside of it.",
    "Unknown option": "This bubblewrap is too old. Install the security update of August 2024, with which it learned "
    "`--bind-fd`, or a newer release.",
    "Race condition": "A granted folder was exchanged while the process was being started. Look at who does so.",
    "setting up uid map": "The user namespace could not be given its users. Look whether another sandbox or security "
    "module restricts it.",
}
_OTHERWISE = "Run it again: the sandbox is tested anew first, and `kiwi doctor` tells then what was found."


def unavailable(
    level: Level, missing: Iterable[str], lacks: JsonObject, reasons: Iterable[str]
) -> IsolationUnavailable:
    """Return the error for a level that no backend here provides; `lacks` is what each backend lacks, by name."""
    lacking = sorted(missing)
    return IsolationUnavailable(
        f"Isolation level {level!r} needs {', '.join(lacking)}, which nothing on this machine gives "
        f"({'; '.join(map(meaning, lacking))}). The tool was not run.",
        suggestion=" ".join(dict.fromkeys(reasons)) or "Let the owner choose another level for this tool.",
        level=level,
        missing=[*lacking],
        backends=lacks,
    )


def failed(backend: str, said: bytes) -> IsolationUnavailable:
    """Return the error of a launcher that ended before the tool began."""
    complaint = said.decode(errors="replace").strip()[-_LAST:]
    return IsolationUnavailable(
        f"The sandbox ({backend}) failed, not the tool, which was not run: {complaint or 'it ended without a word'}.",
        suggestion=remedy(complaint),
        backend=backend,
        launcher=complaint,
    )


def unlaid(fault: OSError) -> IsolationUnavailable:
    """Return the error of a sandbox for which what was granted could not be laid out."""
    return failed("bubblewrap", f"what was granted cannot be laid out: {fault}".encode())


def remedy(complaint: str) -> str:
    """Return the remedy for an error message of a launcher."""
    return next((response for sign, response in _REMEDIES.items() if sign in complaint), _OTHERWISE)


def ungrantable(path: str, reason: str, suggestion: str) -> IsolationUnavailable:
    """Return the refusal of a path that cannot be given to a confined process."""
    return IsolationUnavailable(
        f"The path {path!r} cannot be given to a sandbox: {reason}.", suggestion=suggestion, path=path
    )
