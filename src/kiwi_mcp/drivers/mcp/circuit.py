"""When a server that fails is tried again: at once, later and later, and after too many times not for a while."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from time import monotonic

from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.drivers.mcp.server import Server

OPENS_AFTER = 5
"""Failures in a row after which a server is left alone for a while."""
REST, LONGEST_REST = 30.0, 300.0
"""How long it is left alone at first, and at most, in seconds."""
_LONGEST_WAIT = 15.0


@dataclass(slots=True)
class Circuit:
    """The failures of one server in a row, and when it may be tried again."""

    failures: int = 0
    until: float = 0.0
    last: str = ""

    def failed(self, server: Server, fault: KiwiError) -> None:
        """Count a failure; the first costs no wait, so that a server that died once is back at the next call."""
        self.failures += 1
        self.last = fault.message
        self.until = monotonic() + self._wait(server)

    def worked(self) -> None:
        """Forget the failures: the server answered."""
        self.failures = 0

    def wait(self, server: Server) -> float:
        """Return how long to wait before the next start, or refuse it where that is not worth waiting for."""
        left = max(0.0, self.until - monotonic())
        if left and (self.failures >= OPENS_AFTER or not server.reconnect):
            raise self._refusal(server, left)
        return left

    def _wait(self, server: Server) -> float:
        if self.failures >= OPENS_AFTER:
            return min(REST * 2.0 ** min(self.failures - OPENS_AFTER, 10), LONGEST_REST)
        return min(server.reconnect_delay * (2.0 ** (self.failures - 1) - 1), _LONGEST_WAIT)

    def _refusal(self, server: Server, left: float) -> Unavailable:
        again = datetime.now(UTC) + timedelta(seconds=left)
        times = f"{self.failures} time{'s' if self.failures > 1 else ''}"
        return Unavailable(
            f"The MCP server {server.name!r} failed {times} in a row and is not tried again before "
            f"{again:%H:%M:%S} UTC (in {left:.0f} s). Last: {self.last}",
            suggestion="Mend what the last failure says, or try again then.",
            server=server.identity,
            retry_in=round(left, 1),
        )
