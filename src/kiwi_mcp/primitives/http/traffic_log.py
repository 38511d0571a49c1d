"""The traffic log: hosts, verdicts and bytes. The HTTP client uses it without the proxy."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict, replace

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.primitives.http.addresses import host_port

LISTED = 200
"""The maximum number of rows; beyond it, only totals are recorded."""
Verdict: TypeAlias = Literal["allowed", "denied", "failed"]
_Key: TypeAlias = tuple[str, int, Verdict, str]
_OTHERS: _Key = ("", 0, "denied", "")


class TrafficRow(Struct):
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
        shown = asdict(self)
        return shown if self.reason else {name: value for name, value in shown.items() if name != "reason"}

    def since(self, before: TrafficRow) -> TrafficRow:
        """Return what was added to the row since `before`."""
        return replace(
            self,
            count=self.count - before.count,
            bytes_out=self.bytes_out - before.bytes_out,
            bytes_in=self.bytes_in - before.bytes_in,
        )


class TrafficLog:
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
        self._rows: dict[_Key, TrafficRow] = {}
        self._others = TrafficRow(*_OTHERS)
        self._reported: dict[_Key, TrafficRow] = {}

    def note(self, host: str, port: int, verdict: Verdict, reason: str = "") -> TrafficRow:
        """Count a connection, and return the row that its bytes belong to."""
        shown = host[:253].encode("ascii", errors="backslashreplace").decode()
        key = (shown, port, verdict, reason)
        if key not in self._rows and len(self._rows) >= LISTED:
            row = self._others
        else:
            row = self._rows.setdefault(key, TrafficRow(*key))
        row.count += 1
        return row

    def refused(self) -> tuple[str, ...]:
        """Return the hosts that were denied, each with its port."""
        denied = (row for row in self._rows.values() if row.verdict == "denied")
        return tuple(dict.fromkeys(host_port(row.host, row.port) for row in denied))

    def denials(self) -> tuple[str, ...]:
        """Return the refused targets, a phrase each: host, port, and why."""
        denied = [row for row in self._rows.values() if row.verdict == "denied"]
        return tuple(f"port {row.port} of {row.host} ({row.reason})" for row in denied)

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

    def news(self) -> JsonObject:
        """Return the traffic since the last call, so that every byte is reported once; empty if there is none."""
        rows = {**self._rows, _OTHERS: self._others}
        fresh = {key: row.since(self._reported.get(key) or TrafficRow(*key)) for key, row in rows.items()}
        self._reported = {key: replace(row) for key, row in rows.items()}
        response = TrafficLog()
        response.fault, response._others = self.fault, fresh.pop(_OTHERS)
        response._rows = {key: row for key, row in fresh.items() if row.count or row.bytes_out or row.bytes_in}
        return response.to_json() if response._rows or response._others.count else {}
