"""Questions of threads to their owner, in the store: they survive every process, and the first answer holds."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kiwi_mcp.domain.errors import ThreadNotFound
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.threads import ThreadQuestion
from kiwi_mcp.store.database import OwnedRows, Row, Transaction, Value, clean, id_range, quick_transaction

_COLUMNS = ThreadQuestion.__struct_fields__
_JSON = ("message", "schema", "answer")
"""Stored as JSON in ASCII: every database can store it, whichever characters it has, and nothing is cut off."""
_READ = f"select {', '.join(_COLUMNS)} from questions where owner = ?"  # noqa: S608 - our own names
_ADD = (
    f"insert into questions (owner, root_id, {', '.join(_COLUMNS)})"  # noqa: S608 - as above
    f" select owner, root_id, {', '.join('?' * len(_COLUMNS))} from threads where id = ? on conflict do nothing"
)
_ANSWER = """update questions set status = 'answered', answer = ?, answered_by = ?, answered_at = ?
  where owner = ? and id = ? and status = 'open' and expires_at > ?"""
_encode = json.JSONEncoder(separators=(",", ":")).encode


class Questions(OwnedRows):
    """The questions to one owner."""

    def get(self, wanted: str) -> ThreadQuestion:
        """Return a question by its id, or by the beginning of its id."""
        start, end = id_range(wanted)
        rows = self.database.read(f"{_READ} and id >= ? and id < ? limit 2", (self.owner, start, end))
        if len(rows) != 1 or not start:
            raise ThreadNotFound(wanted, what="question", is_several=bool(rows and start))
        return _question(rows[0])

    def answer(self, question_id: str, answer: Json, by: str, now: int) -> ThreadQuestion:
        """Store an answer in time, and return the question as it is then: an earlier answer holds."""
        values = (_encode(answer), clean(by), now, self.owner, question_id, now)
        with quick_transaction(self.database) as transaction:
            transaction.write(_ANSWER, values)
            rows = transaction.read(f"{_READ} and id = ?", (self.owner, clean(question_id)))
        if not rows:
            raise ThreadNotFound(question_id, what="question")
        return _question(rows[0])

    def open(self, now: int, *, thread_id: str | None = None, root_id: str | None = None) -> tuple[ThreadQuestion, ...]:
        """Return the questions that wait for an answer: of a thread, of a tree, or all; the oldest first."""
        given = [(clause, value) for clause, value in (("thread_id", thread_id), ("root_id", root_id)) if value]
        where = "".join(f" and {name} = ?" for name, _ in given)
        values: Sequence[Value] = (self.owner, now, *(clean(value) for _, value in given))
        rows = self.database.read(f"{_READ} and status = 'open' and expires_at > ?{where} order by id", values)
        return tuple(map(_question, rows))

    def of_thread(self, thread_id: str) -> tuple[ThreadQuestion, ...]:
        """Return every question of a thread, the oldest first."""
        rows = self.database.read(f"{_READ} and thread_id = ? order by id", (self.owner, clean(thread_id)))
        return tuple(map(_question, rows))

    def expire(self, now: int) -> tuple[ThreadQuestion, ...]:
        """Close the questions that were not answered in time, and return them."""
        late = "select 1 from questions where owner = ? and status = 'open' and expires_at <= ? limit 1"
        if not self.database.read(late, (self.owner, now)):  # workers ask all the time, and seldom need to write
            return ()
        statement = f"""update questions set status = 'expired' where owner = ? and status = 'open' and expires_at <= ?
          returning {", ".join(_COLUMNS)}"""  # noqa: S608 - as above
        with quick_transaction(self.database) as transaction:
            return tuple(map(_question, transaction.read(statement, (self.owner, now))))


def ask(transaction: Transaction, question: ThreadQuestion) -> None:
    """Store a question in the transaction of its event. A question that is stored already stays as it is."""
    cells = {name: getattr(question, name) for name in _COLUMNS}
    cells |= {name: _encode(cells[name]) for name in _JSON}
    transaction.write(_ADD, (*(cells[name] for name in _COLUMNS), question.thread_id))


def _question(row: Row) -> ThreadQuestion:
    cells: dict[str, Json] = dict(zip(_COLUMNS, row, strict=True))
    cells |= {name: json.loads(str(cells[name])) for name in _JSON}
    return ThreadQuestion(**cells)  # type: ignore[arg-type]  # the columns are the fields, and the schema checks them
