"""Receipts in the store: one append-only hash chain of all calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import asdict, replace

from kiwi_mcp.domain.errors import NotFound, StoreUnavailable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import canonical
from kiwi_mcp.domain.records import Receipt, ReceiptEntry, ReceiptHead, RunStatus
from kiwi_mcp.domain.times import iso
from kiwi_mcp.store.database import (
    Database,
    IntegrityFault,
    Row,
    Transaction,
    Value,
    clean,
    conditions,
    id_range,
    insert_into,
    plain,
    within,
)
from kiwi_mcp.store.principals import is_named, named

KIND = b"kiwi-receipt-v1\0"
"""The prefix of the hashed data of a receipt, so that its hash cannot match another kind of data."""
ABANDONED = "Kiwi ended while it ran; whether it was done is unknown."
_SAID = Receipt.__struct_fields__
_COLUMNS = ("seq", *_SAID, "previous", "hash")
_ADD = insert_into("receipts", _COLUMNS)
_READ = f"select {', '.join(_COLUMNS)} from receipts"  # noqa: S608 - our own names
_LAST = "select seq, hash from receipts order by seq desc limit 1"
_PAGE = 1_000
_RECORDING = 10.0  # how many seconds a server may be silent while a receipt is written. The caller waits for it.
_FIX = "Compare it with an export or a backup: what stands before the first fault was not changed."
_values = attrgetter(*_SAID)


class ReceiptFilter(Struct, frozen=True):
    """Which receipts are wanted; times are milliseconds since 1970, and `before` is the number a page ended with."""

    item: str | None = None
    actor: str | None = None
    action: str | None = None
    status: RunStatus | None = None
    since: int | None = None
    until: int | None = None
    before: int | None = None
    limit: int = 20


class ReceiptSummary(Struct, frozen=True):
    """What a receipt says of who did what, and when, in short."""

    at: str
    actor: str
    surface: str
    action: str
    item: str
    identity: str

    def is_of(self, name: str) -> bool:
        """Whether the actor of this receipt has this display name."""
        return is_named(self.actor, name)


def append(transaction: Transaction, receipt: Receipt) -> None:
    """Append a receipt to the chain. The transaction keeps other writers out until it ends."""
    last = transaction.read(_LAST)
    seq, previous = (int(str(last[0][0])) + 1, str(last[0][1])) if last else (1, ReceiptHead().hash)
    said = plain(_values(receipt))
    transaction.write(_ADD, (seq, *said, previous, seal(seq, said, previous)))


def seal(seq: int, said: Sequence[Value], previous: str) -> str:
    """Return the hash of a receipt in its place."""
    words = dict(zip(_SAID, said, strict=True)) | {"seq": seq, "previous": previous}
    return sha256(KIND + canonical(words)).hexdigest()


def begin(transaction: Transaction, call: str, kernel: str, receipt: Receipt | None) -> None:
    """Store that `kernel` starts a call. `receipt` is written if that kernel disappears."""
    text = json.dumps(asdict(receipt)) if receipt else ""
    transaction.write("insert into started_calls (id, kernel, receipt) values (?, ?, ?)", (call, clean(kernel), text))


def end(transaction: Transaction, call: str) -> bool:
    """Store that a call is not under way any more, and return whether it was."""
    return transaction.write("delete from started_calls where id = ?", (call,)) > 0


def close_abandoned(database: Database, is_gone: Callable[[str], bool]) -> None:
    """Mark the calls of kernels that no longer run as unknown, with a receipt for each: their progress is not known."""
    for call, kernel, text in database.read("select id, kernel, receipt from started_calls"):
        if not is_gone(str(kernel)):
            continue
        with database.transaction() as transaction:
            if not end(transaction, str(call)):  # another process was first
                continue
            transaction.write(
                "update runs set status = 'unknown', code = 'unknown', message = ? where id = ? and status = 'started'",
                (ABANDONED, call),
            )
            if text:
                append(transaction, replace(Receipt(**json.loads(str(text))), status="unknown", code="unknown"))


class Receipts:
    """The receipts of one store, for all actors."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.url = database.url

    def begin(self, receipt: Receipt, kernel: str) -> None:
        """Store that a call starts which leaves no run; `finish` writes its receipt."""
        with within(_RECORDING), self._database.transaction() as transaction:
            begin(transaction, receipt.id, kernel, receipt)

    def finish(self, receipt: Receipt) -> None:
        """Write the receipt of a call that was begun."""
        with within(_RECORDING), self._database.transaction() as transaction:
            append(transaction, receipt)
            end(transaction, receipt.id)

    def add(self, receipt: Receipt) -> None:
        """Write down a call that left no run."""
        with recording(self._database, "receipt") as transaction:
            append(transaction, receipt)

    def add_now(self, receipt: Receipt) -> bool:
        """Write a receipt of what changed nothing, if no waiting is needed; a power loss may take it away."""
        try:
            with self._database.transaction_now() as transaction:
                if transaction is None:
                    return False
                append(transaction, receipt)
        except IntegrityFault as fault:
            raise refused("receipt", fault) from fault
        return True

    def list(self, wanted: ReceiptFilter) -> tuple[ReceiptEntry, ...]:
        """Return the receipts that are wanted, the newest first."""
        where, values = conditions(
            ("item = ?", wanted.item),
            ("action = ?", wanted.action),
            ("status = ?", wanted.status),
            ("at >= ?", None if wanted.since is None else iso(wanted.since)),
            ("at < ?", None if wanted.until is None else iso(wanted.until)),
            ("seq < ?", wanted.before),
        )
        own, mine = ("true", ()) if wanted.actor is None else named(wanted.actor)
        statement = f"{_READ} where {where} and {own} order by seq desc limit ?"
        return tuple(map(_entry, self._database.read(statement, (*values, *mine, wanted.limit))))

    def find(self, name: str, limit: int) -> tuple[ReceiptEntry, ...]:
        """Return the receipts of a number, or of an id or the beginning of one."""
        if name.isdecimal() and name.isascii() and len(name) < len(str(2**63)):
            return tuple(map(_entry, self._database.read(f"{_READ} where seq = ?", (int(name),))))
        statement = f"{_READ} where id >= ? and id < ? order by id limit ?"
        return tuple(map(_entry, self._database.read(statement, (*id_range(name), limit))))

    def after(self, seq: int, limit: int) -> tuple[ReceiptEntry, ...]:
        """Return the receipts behind a number, the oldest first."""
        return tuple(map(_entry, self._database.read(f"{_READ} where seq > ? order by seq limit ?", (seq, limit))))

    def glance(self, most: int) -> tuple[ReceiptSummary, ...]:
        """Return short summaries of the newest receipts, in their order, without reading any others."""
        rows = self._database.read(
            "select at, actor, surface, action, item, identity from receipts"
            " where seq > (select max(seq) from receipts) - ? order by seq",
            (most,),
        )
        return tuple(ReceiptSummary(*map(str, row)) for row in rows)

    def settled_head(self) -> ReceiptHead:
        """Return the end of the chain, once a loss of power cannot take it away."""
        rows = self._database.read(_LAST)
        self._database.settle()
        return ReceiptHead(int(str(rows[0][0])), str(rows[0][1])) if rows else ReceiptHead()

    def holds(self, head: ReceiptHead) -> bool:
        """Whether the chain once ended so, and has at most grown since."""
        rows = self._database.read("select hash from receipts where seq = ?", (head.count,))
        return head == ReceiptHead() if not rows else rows[0][0] == head.hash

    def verify(self, most: int) -> tuple[ReceiptHead, Sequence[Issue]]:
        """Return the end of the chain, and where it is not what was written; no more faults than asked for."""
        issues: list[Issue] = []
        head = ReceiptHead()
        while len(issues) < most and (page := self.after(head.count, _PAGE)):
            for entry in page:
                issues += _faults(entry, head)
                head = ReceiptHead(entry.seq, entry.hash)
        return head, issues[:most]

    def required(self, name: str) -> ReceiptEntry:
        """Return the one receipt that a number, an id or the beginning of one means."""
        match self.find(name, 2):
            case (entry,):
                return entry
            case several:
                raise NotFound(
                    f"{name[:40]!r} is {'the beginning of several ids' if several else 'no receipt'}.",
                    suggestion="List receipts with `kiwi audit`, and name one by its number or its id.",
                )


def _faults(entry: ReceiptEntry, before: ReceiptHead) -> Iterator[Issue]:
    """Yield the faults of a receipt, given the head of the chain before it."""
    place = f"receipt {entry.seq}"
    if entry.seq != before.count + 1:
        first, last = before.count + 1, entry.seq - 1
        missing = f"receipt {first}" if first == last else f"receipts {first} to {last}"
        yield Issue(missing, "removed from the chain", _FIX)
    elif entry.previous != before.hash:
        yield Issue(place, "it does not follow the one before it", _FIX)
    if seal(entry.seq, _values(entry.receipt), entry.previous) != entry.hash:
        yield Issue(place, "it was changed after it was written", _FIX)


def refused(record: str, fault: IntegrityFault) -> StoreUnavailable:
    """Return the error for a record that a rule of the schema refused."""
    return StoreUnavailable(
        f"The store refused the {record}: {fault.reason}.", suggestion="Check the store with `kiwi doctor`."
    )


@contextmanager
def recording(database: Database, record: str) -> Iterator[Transaction]:
    """Write a record for which its caller waits."""
    try:
        with within(_RECORDING), database.transaction() as transaction:
            yield transaction
    except IntegrityFault as fault:
        raise refused(record, fault) from fault


def _entry(row: Row) -> ReceiptEntry:
    seq, *said, previous, own = row
    return ReceiptEntry(int(str(seq)), Receipt(*said), str(previous), str(own))  # type: ignore[arg-type]  # columns are fields
