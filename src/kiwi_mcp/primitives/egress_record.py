"""What left: which hosts a confined process asked for, what came of it and how much was sent, but never what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from kiwi_mcp.domain.json import JsonObject

LISTED = 200
"""How many rows are kept; of what is beyond, only the sums are."""
_LONGEST = 253
Verdict: TypeAlias = Literal["allowed", "denied", "failed"]
_Key: TypeAlias = tuple[str, int, Verdict, str]
_OTHERS: _Key = ("", 0, "denied", "")


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

    def since(self, before: Row | None) -> Row:
        """Return what was added to the row."""
        if before is None:
            return replace(self)
        return replace(
            self,
            count=self.count - before.count,
            bytes_out=self.bytes_out - before.bytes_out,
            bytes_in=self.bytes_in - before.bytes_in,
        )


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
        self._rows: dict[_Key, Row] = {}
        self._others = Row(*_OTHERS)
        self._told: dict[_Key, Row] = {}

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

    def denials(self) -> tuple[str, ...]:
        """Return what was asked for in vain, a phrase each: host, port, and why not."""
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
        """Return what is new since this was asked last, so that every byte is told once; empty where nothing is."""
        rows = {**self._rows, _OTHERS: self._others}
        fresh = {key: row.since(self._told.get(key)) for key, row in rows.items()}
        self._told = {key: replace(row) for key, row in rows.items()}
        told = Ledger()
        told.fault, told._others = self.fault, fresh.pop(_OTHERS)
        told._rows = {key: row for key, row in fresh.items() if row.count or row.bytes_out or row.bytes_in}
        return told.to_json() if told._rows or told._others.count else {}
