"""Rate limits in the store: how many calls a rule allowed in the last minute, counted for all processes."""

from __future__ import annotations

from collections.abc import Mapping

from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.store.database import OwnedRows, clean, quick_transaction

_MINUTE_MS = 60_000
# A time that is more than a minute ahead was written before the clock was set back.
_FORGET = "delete from rate_calls where owner = ? and rule = ? and (at <= ? or at > ?)"
_LAST = "select at from rate_calls where owner = ? and rule = ? order by at desc limit 1 offset ?"


class Rates(OwnedRows):
    """The rate limits of one owner."""

    def take(self, limits: Mapping[str, int], now: int | None = None) -> tuple[str, float]:
        """Count one call for each rule and return ("", 0); if one is at its limit, count none, and return it.

        `limits` has the calls per minute of each rule. The number is how many seconds are left until the next call.
        """
        now = now or now_ms()
        with quick_transaction(self.database) as transaction:
            for rule, per_minute in limits.items():
                transaction.write(_FORGET, (self.owner, clean(rule), now - _MINUTE_MS, now + _MINUTE_MS))
                for (at,) in transaction.read(_LAST, (self.owner, clean(rule), per_minute - 1)):
                    return rule, (int(str(at)) + _MINUTE_MS - now) / 1_000
            rows = [(self.owner, clean(rule), now) for rule in limits]
            transaction.insert("rate_calls", ("owner", "rule", "at"), rows)
        return "", 0.0
