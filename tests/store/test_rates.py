"""Rate limits in the store: exactly n calls in a minute, whichever processes make them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.rates import Rates

NOW = 1_769_601_600_000
MINUTE = 60_000


def test_a_rule_allows_exactly_n_calls_in_any_minute(database: Database) -> None:
    rates, other = Rates(database, "ada"), Rates(database, "bob")
    taken = [rates.take({"a": 2, "all": 3}, NOW + at)[1] for at in (0, 10_000, 20_000, 59_999, 60_000, 60_001)]
    assert taken == [0, 0, 40.0, 0.001, 0, 9.999]
    assert rates.take({"b": 9, "all": 3}, NOW + 60_002) == ("", 0)
    assert rates.take({"b": 9, "all": 3}, NOW + 60_003) == ("all", 9.997)
    assert rates.take({"b": 2}, NOW + 60_004) == ("", 0)  # what was refused was not counted
    assert other.take({"a": 1}, NOW + 60_004) == ("", 0)
    assert rates.take({"a": 2}, NOW - 7 * MINUTE) == ("", 0)  # the clock was set back


def test_many_connections_share_one_limit(store_url: str) -> None:
    databases = [open_database(store_url) for _ in range(4)]

    def take(number: int) -> bool:
        return not Rates(databases[number % 4], "ada").take({"a": 7}, NOW)[0]

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(40))) == 7
    for database in databases:
        database.close()
