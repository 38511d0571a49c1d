"""What is said where isolation is missing or failed: which level, what is missing, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable

from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import Level
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.sandbox.levels import in_order, meaning

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
    level: Level, missing: Iterable[str], standings: JsonObject, reasons: Iterable[str]
) -> IsolationUnavailable:
    """Return the refusal of a level that no backend here can give; `standings` are what each lacks, by its name."""
    lacking = in_order(missing)
    return IsolationUnavailable(
        f"Isolation level {level!r} needs {', '.join(lacking)}, which nothing on this machine gives "
        f"({'; '.join(map(meaning, lacking))}). The tool was not run.",
        suggestion=" ".join(dict.fromkeys(reasons)) or "Let the owner choose another level for this tool.",
        level=level,
        missing=list(lacking),
        backends=standings,
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
    """Return what to do about a complaint of a launcher."""
    return next((told for sign, told in _REMEDIES.items() if sign in complaint), _OTHERWISE)


def ungrantable(path: str, reason: str, suggestion: str) -> IsolationUnavailable:
    """Return the refusal of a path that cannot be given to a confined process."""
    return IsolationUnavailable(
        f"The path {path!r} cannot be given to a sandbox: {reason}.", suggestion=suggestion, path=path
    )
