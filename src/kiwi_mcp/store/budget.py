"""Budgets of threads in the store: reservations, charges, what children get, and limits per day.

Every change of a counter is a row of the ledger: `reserved` and `reserved_tokens` are what it adds to the reservations
of the thread, `spend` and the token classes what it adds to the usage. A child's limits are reserved by its parent.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, cast

from msgspec import Struct

from kiwi_mcp.domain.errors import BudgetExceeded, LeaseLost, ThreadEnded
from kiwi_mcp.domain.threads import DayLimits, Thread, ThreadUsage
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.store.database import Database, Transaction, Value, clean, insert_into, quick_transaction
from kiwi_mcp.store.runs import new_run

DAY_MS = 86_400_000
LedgerKind: TypeAlias = Literal["reserve", "settle", "charge_maximum", "release", "carve", "return"]
COUNTERS = ("spend", "input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens")
_TOKENS = "input_tokens + cache_read_tokens + cache_write_tokens + output_tokens"
_FITS = f"spend + reserved + ? <= spend_limit and {_TOKENS} + reserved_tokens + ? <= token_limit"
_ADD = "update threads set reserved = reserved + ?, reserved_tokens = reserved_tokens + ? where id = ? and ended_at = 0"
_RESERVE = f"{_ADD} and lease = ? and {_FITS}"
_CARVE = f"{_ADD} and {_FITS}"
_CLOSE = f"""update threads set reserved = reserved + ?, reserved_tokens = reserved_tokens + ?,
  {", ".join(f"{name} = {name} + ?" for name in COUNTERS)}, is_estimated = is_estimated | ? where id = ?"""  # noqa: S608 - our own names
_REST = f"""select spend_limit - spend - reserved, token_limit - ({_TOKENS}) - reserved_tokens, lease, ended_at, status
  from threads where id = ?"""  # noqa: S608 - as above
_DAY = """select cast(coalesce(sum(spend + reserved), 0) as bigint),
  cast(coalesce(sum(case when starter = ? then spend + reserved else 0 end), 0) as bigint)
  from budget_days where owner = ? and day = ?"""
_ADD_DAY = """insert into budget_days (owner, starter, day, spend, reserved) values (?, ?, ?, 0, ?)
  on conflict (owner, day, starter) do update set reserved = budget_days.reserved + excluded.reserved"""
_CLOSE_DAY = """update budget_days set reserved = reserved - ?, spend = spend + ?
  where owner = ? and starter = ? and day = ?"""
_CLOSED = "('settle', 'charge_maximum', 'release', 'return')"
_OPEN = f"""select l.reservation, t.id, t.root_id, t.owner, t.starter, l.at, l.reserved, l.reserved_tokens, l.attempt
  from budget_ledger l join threads t on t.id = l.thread_id where l.thread_id = ? and l.kind = 'reserve' and not exists
  (select 1 from budget_ledger c where c.reservation = l.reservation and c.kind in {_CLOSED}) order by l.id"""  # noqa: S608 - as above
_CHILD = f"""select parent_id, root_id, ended_at, reserved, reserved_tokens, spend_limit, token_limit,
  {", ".join(COUNTERS)}, is_estimated from threads where id = ?"""  # noqa: S608 - as above
_SUMMED = ("reserved", "reserved_tokens", *COUNTERS)
_SUMS = f"""select {", ".join(f"cast(coalesce(sum({name}), 0) as bigint)" for name in _SUMMED)},
  coalesce(max(is_estimated), 0) from budget_ledger where thread_id = ?"""  # noqa: S608 - as above


class Reservation(Struct, frozen=True):
    """Money and tokens that one request to a model may use."""

    id: str
    thread_id: str
    root_id: str
    owner: str
    starter: str
    at: int
    micros: int
    tokens: int
    attempt: int


class Refusal(Struct, frozen=True):
    """Which limit a reservation exceeds, and what it would still allow: micros, or tokens."""

    limit: Literal["spend", "tokens", "starter_day", "owner_day"]
    wanted: int
    rest: int


class LedgerEntry(Struct, frozen=True):
    """One row of the ledger."""

    id: str
    reservation: str  # the id of the reservation; of a `carve` or `return`, the id of the child
    thread_id: str
    root_id: str
    at: int
    kind: LedgerKind
    attempt: int = 0
    reserved: int = 0
    reserved_tokens: int = 0
    spend: int = 0
    input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    is_estimated: int = 0
    model: str = ""
    price_source: str = ""


_COLUMNS = LedgerEntry.__struct_fields__
_ADD_ENTRY = f"{insert_into('budget_ledger', _COLUMNS)} on conflict do nothing"
_READ = f"select {', '.join(_COLUMNS)} from budget_ledger where thread_id = ? or root_id = ? order by id"  # noqa: S608 - as above


class Budget:
    """The budgets of the threads in one store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def reserve(
        self, thread: Thread, attempt: int, micros: int, tokens: int, *, day_limits: DayLimits, now: int | None = None
    ) -> Reservation | Refusal:
        """Reserve money and tokens for one request, under the lease of the thread; a limit of n allows exactly n."""
        with quick_transaction(self._database) as transaction:
            now = now or now_ms()
            if micros:
                ((every, own),) = transaction.read(_DAY, (thread.starter, thread.owner, now // DAY_MS))
                if (rest := day_limits.owner - int(str(every))) < micros:
                    return Refusal("owner_day", micros, max(rest, 0))
                if thread.starter and (rest := day_limits.starter - int(str(own))) < micros:
                    return Refusal("starter_day", micros, max(rest, 0))
            if not transaction.write(_RESERVE, (micros, tokens, thread.id, thread.lease, micros, tokens)):
                return _refusal(transaction, thread.id, micros, tokens, lease=thread.lease)
            id_ = new_run(now)[0]
            place = (thread.id, thread.root_id)
            transaction.write(_ADD_DAY, (thread.owner, thread.starter, now // DAY_MS, micros))
            _add(
                transaction,
                LedgerEntry(id_, id_, *place, now, "reserve", attempt, reserved=micros, reserved_tokens=tokens),
            )
            return Reservation(id_, *place, thread.owner, thread.starter, now, micros, tokens, attempt)

    def settle(
        self, reservation: Reservation, micros: int, usage: ThreadUsage, *, model: str = "", price_source: str = ""
    ) -> bool:
        """Charge what a request used, and free the rest; return False if the reservation was closed before."""
        with quick_transaction(self._database) as transaction:
            return settle(transaction, reservation, micros, usage, model=model, price_source=price_source)

    def charge_maximum(self, reservation: Reservation) -> bool:
        """Charge a whole reservation: the reply was lost, and what it cost is not known."""
        with quick_transaction(self._database) as transaction:
            return _charge_maximum(transaction, reservation)

    def release(self, reservation: Reservation) -> bool:
        """Free a reservation of which nothing was used."""
        with quick_transaction(self._database) as transaction:
            return settle(transaction, reservation, 0, ThreadUsage(), kind="release")

    def ledger(self, thread_id: str) -> tuple[LedgerEntry, ...]:
        """Return the ledger of a thread, of a root with that of its whole tree, the oldest entry first."""
        rows = self._database.read(_READ, (thread_id, thread_id))
        return tuple(LedgerEntry(*row) for row in rows)  # type: ignore[arg-type]  # the columns are the fields


def settle(
    transaction: Transaction,
    reservation: Reservation,
    micros: int,
    usage: ThreadUsage,
    *,
    kind: Literal["settle", "charge_maximum", "release"] = "settle",
    model: str = "",
    price_source: str = "",
) -> bool:
    """Close a reservation inside a transaction; return False if it was closed before. No lease is needed."""
    entry = LedgerEntry(
        new_run(now := now_ms())[0], reservation.id, reservation.thread_id, reservation.root_id, now, kind,
        reservation.attempt, -reservation.micros, -reservation.tokens, micros, usage.input_tokens,
        usage.cache_read_tokens, usage.cache_write_tokens, usage.output_tokens, int(usage.is_estimated),
        clean(model), clean(price_source),
    )  # fmt: skip
    if not _close(transaction, entry):
        return False
    day = reservation.at // DAY_MS  # the day of the request
    transaction.write(_CLOSE_DAY, (reservation.micros, micros, reservation.owner, reservation.starter, day))
    return True


def _charge_maximum(transaction: Transaction, reservation: Reservation) -> bool:
    # Which tokens were used is not known: all count as input.
    usage = ThreadUsage(input_tokens=reservation.tokens, is_estimated=True)
    return settle(transaction, reservation, reservation.micros, usage, kind="charge_maximum")


def charge_open(transaction: Transaction, thread_id: str) -> None:
    """Charge every reservation of a thread that was not closed."""
    for row in transaction.read(_OPEN, (thread_id,)):
        _charge_maximum(transaction, Reservation(*row))  # type: ignore[arg-type]  # the columns are the fields


def carve(
    transaction: Transaction, parent_id: str, root_id: str, child_id: str, micros: int, tokens: int, now: int
) -> None:
    """Take the limits of a child, or a change of them, from the rest of its parent."""
    is_less = micros <= 0 and tokens <= 0
    statement, fits = (_ADD, ()) if is_less else (_CARVE, (micros, tokens))
    if not transaction.write(statement, (micros, tokens, parent_id, *fits)):
        refusal = _refusal(transaction, parent_id, micros, tokens)
        raise BudgetExceeded(refusal.limit, wanted=refusal.wanted, rest=refusal.rest)
    id_ = new_run(now)[0]
    entry = LedgerEntry(id_, child_id, parent_id, root_id, now, "carve", reserved=micros, reserved_tokens=tokens)
    _add(transaction, entry)


def return_rest(transaction: Transaction, child_id: str, now: int) -> bool:
    """Give the rest of an ended child to its parent, and so on upwards. A child with open reservations is left."""
    ((parent, root, ended_at, *cells),) = transaction.read(_CHILD, (child_id,))
    reserved, reserved_tokens, spend_limit, token_limit, *used = (int(str(cell)) for cell in cells)
    if parent is None or not ended_at or reserved or reserved_tokens:
        return False
    entry = LedgerEntry(
        new_run(now)[0], child_id, str(parent), str(root), now, "return", 0, -spend_limit, -token_limit,
        *used,  # type: ignore[arg-type]  # the counters, in their order
    )  # fmt: skip
    if not _close(transaction, entry):
        return False
    return_rest(transaction, str(parent), now)
    return True


def ledger_sums(database: Database, thread_id: str) -> dict[str, int]:
    """Return the counters of a thread as its ledger has them."""
    (row,) = database.read(_SUMS, (thread_id,))
    return {name: int(str(cell)) for name, cell in zip((*_SUMMED, "is_estimated"), row, strict=True)}


def _close(transaction: Transaction, entry: LedgerEntry) -> bool:
    if not _add(transaction, entry):
        return False
    used = (entry.spend, entry.input_tokens, entry.cache_read_tokens, entry.cache_write_tokens, entry.output_tokens)
    values = (entry.reserved, entry.reserved_tokens, *used, entry.is_estimated, entry.thread_id)
    transaction.write(_CLOSE, values)
    return True


def _add(transaction: Transaction, entry: LedgerEntry) -> int:
    return transaction.write(_ADD_ENTRY, [cast("Value", getattr(entry, name)) for name in _COLUMNS])


def _refusal(
    transaction: Transaction, thread_id: str, micros: int, tokens: int, *, lease: int | None = None
) -> Refusal:
    """Return what a thread lacks; raise if it has ended, or if it has another lease than the given one."""
    rows = transaction.read(_REST, (thread_id,))
    if not rows:
        raise LeaseLost(thread_id)
    spend, rest_tokens, current, ended_at, status = rows[0]
    if ended_at:
        raise ThreadEnded(thread_id, str(status))
    if lease is not None and current != lease:
        raise LeaseLost(thread_id)
    if int(str(spend)) < micros:
        return Refusal("spend", micros, max(int(str(spend)), 0))
    return Refusal("tokens", tokens, max(int(str(rest_tokens)), 0))
