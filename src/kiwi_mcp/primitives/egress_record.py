"""What left: which hosts a confined process asked for, what came of it and how much was sent, but never what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kiwi_mcp.domain.json import JsonObject

LISTED = 200
"""How many rows are kept; of what is beyond, only the sums are."""
_LONGEST = 253
Verdict: TypeAlias = Literal["allowed", "denied", "failed"]


@dataclass(slots=True)
class Row:
    """What one host was asked for at one port with one verdict."""

    host: str
    port: int
    verdict: Verdict
    reason: str = ""
    count: int = 0
    bytes_out: int = 0
    bytes_in: int = 0

    def to_json(self) -> JsonObject:
        """Return the row, without a reason where there is none."""
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return shown if self.reason else {name: value for name, value in shown.items() if name != "reason"}


class Ledger:
    """The rows of one process, and whether its proxy lasted as long as it did."""

    def __init__(self) -> None:
        self.fault = ""
        """Why the proxy ended before the process did; empty where it did not."""
        self.is_kept = False
        """Whether there was a proxy at all to write into it."""
        self.is_closed = False
        """Whether the process has ended, so that the proxy may."""
        self.bytes = 0
        """What went in both directions, of all connections together."""
        self._rows: dict[tuple[str, int, Verdict, str], Row] = {}
        self._others = Row("", 0, "denied")

    def note(self, host: str, port: int, verdict: Verdict, reason: str = "") -> Row:
        """Count a connection, and return the row that its bytes belong to."""
        shown = host[:_LONGEST].encode("ascii", errors="backslashreplace").decode()
        key = (shown, port, verdict, reason)
        if key not in self._rows and len(self._rows) >= LISTED:
            row = self._others
        else:
            row = self._rows.setdefault(key, Row(*key))
        row.count += 1
        return row

    def refused(self) -> tuple[str, ...]:
        """Return the hosts that were asked for in vain, each with its port."""
        denied = [(row.host, row.port) for row in self._rows.values() if row.verdict == "denied"]
        return tuple(dict.fromkeys(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in denied))

    def to_json(self) -> JsonObject:
        """Return all that is recorded, as outcomes show it."""
        rows = [*self._rows.values(), self._others]
        return {
            "connections": sum(row.count for row in rows),
            "bytes_out": sum(row.bytes_out for row in rows),
            "bytes_in": sum(row.bytes_in for row in rows),
            "hosts": [row.to_json() for row in self._rows.values()],
            **({"unlisted": self._others.count} if self._others.count else {}),
            **({"fault": self.fault} if self.fault else {}),
        }
