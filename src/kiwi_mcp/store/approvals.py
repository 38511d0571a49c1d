"""Approvals in the store: durable questions to the owner, one-time answers, and rules."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Literal, TypeVar

from msgspec import convert, to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.errors import ApprovalNotFound, ApprovalsWaiting, Conflict, Denied
from kiwi_mcp.domain.records import Approval, ApprovalRule, ApprovalStatus
from kiwi_mcp.store.database import (
    Database,
    IntegrityFault,
    OwnedRows,
    Row,
    Transaction,
    Value,
    clean,
    id_range,
    insert_into,
    json_column,
    within,
)
from kiwi_mcp.store.runs import new_run

MOST_PENDING = 20  # how many questions of one actor may wait
MOST_A_MINUTE = 10
"""How many new questions one actor may ask in a minute; those that the owner said yes to are not counted."""
MOST_RULES = 1_000
_MINUTE_MS = 60_000
_KEPT_MS = 30 * 86_400_000  # how long a question is kept that is over
_STEP = 500
_PATIENCE = 10.0  # for how many seconds a server may be silent: a call waits for it

_COLUMNS = Approval.__struct_fields__
_JSON = frozenset({"reasons", "plan", "touched", "first_runs", "request", "paths", "hosts", "argv"})
"""The columns of approvals and rules that hold JSON."""
_READ = f"select {', '.join(_COLUMNS)} from approvals where owner = ?"  # noqa: S608 - our own names
_ADD = insert_into("approvals", ("owner", *_COLUMNS))
_YESES = ("approved", "used")
_ANSWERABLE = frozenset({"pending", "approved", "denied"})
"""What may still be answered otherwise, as long as it is not expired."""
_OPEN = "status in ('pending', 'approved')"
_NOW = f"(case when {_OPEN} and expires_at <= ? then 'expired' else status end)"
"""The status as it is at a time, whether or not that was written down."""
_OVERDUE = f"{_READ} and {_OPEN} and expires_at <= ? order by expires_at limit ?"
_EXPIRE = "update approvals set status = 'expired' where owner = ? and id = ?"
_STRIP = "update approvals set plan = ?, preview = ?, request = ? where owner = ? and id = ?"
_INPUTS, _UNKEPT = "parameters:", "parameters: (not kept once a question is over)"
INPUT_MARK = "  > "
"""What every line of a question begins with that shows parameters, so that no parameter can imitate the question."""
_LASTING = ("identity", "digest", "driver", "chain", "jail", "effect", "variables", "left_out", "server", "thread")
"""The words of a plan that are kept once its question is over: those that hold no parameter."""
_PRUNE = """delete from approvals where id in (select id from approvals where owner = ? and created_at < ?
  and status not in ('pending', 'approved') order by created_at limit ?)"""
_WAITING = "select count(*) from approvals where owner = ? and actor = ? and status = 'pending'"
_RECENT = """select count(*) from approvals where owner = ? and actor = ? and created_at > ?
  and status not in ('approved', 'used')"""
_PLAN = "and actor = ? and project = ? and plan_digest = ?"
_USE = """update approvals set status = 'used', run_id = ?
  where owner = ? and id = ? and status = 'approved' and expires_at > ?"""
_DECIDE = """update approvals set status = ?, decided_at = ?, decided_by = ?, decided_how = ?, reason = ?
  where owner = ? and id = ?"""
_KNOW = "insert into first_runs (owner, digest, approval, at) values (?, ?, ?, ?) on conflict do nothing"
_RULE_COLUMNS = ApprovalRule.__struct_fields__
_READ_RULES = f"select {', '.join(_RULE_COLUMNS)} from approval_rules where owner = ?"  # noqa: S608 - as above
_ADD_RULE = insert_into("approval_rules", ("owner", *_RULE_COLUMNS))
_NEXT_NUMBER = """insert into approval_numbers (owner, last) values (?, 1)
  on conflict (owner) do update set last = approval_numbers.last + 1 returning last"""
_LONGEST_NUMBER = 9
_Kind = TypeVar("_Kind", Approval, ApprovalRule)


class Approvals(OwnedRows):
    """The questions to one owner, and that owner's rules. What one process writes, every other reads."""

    def ask(self, question: Approval) -> Approval:
        """Keep a question and return it, or the one that waits for the same already; too many are refused."""
        try:
            with within(_PATIENCE), self.database.transaction() as transaction:
                self._tidy(transaction, question.created_at)
                if known := self._of_plan(transaction, question, "pending"):
                    return known
                actor_key = (self.owner, clean(question.actor))
                waiting = int(transaction.read(_WAITING, actor_key)[0][0] or 0)
                recent = int(transaction.read(_RECENT, (*actor_key, question.created_at - _MINUTE_MS))[0][0] or 0)
                if waiting >= MOST_PENDING or recent >= MOST_A_MINUTE:
                    raise ApprovalsWaiting(waiting)
                return self._add(transaction, question)
        except IntegrityFault:  # another process has asked the same in this very moment
            if known := self._of_plan(self.database, question, "pending"):
                return known
            raise

    def _add(self, transaction: Transaction, question: Approval) -> Approval:
        """Store a question under the next number, and return it."""
        numbered = replace(question, number=transaction.read(_NEXT_NUMBER, (self.owner,))[0][0])
        transaction.write(_ADD, (self.owner, *_row(numbered)))
        return numbered

    def take(self, plan: Approval, run_id: str) -> Approval | None:
        """Use up the approval of a plan for one run, if there is one: of all who try, one succeeds, and only once."""
        with within(_PATIENCE):
            if self._of_plan(self.database, plan, "approved") is None:
                return None
            with self.database.transaction() as transaction:
                found = self._of_plan(transaction, plan, "approved")
                if found is None or not self._use(transaction, found, run_id, plan.created_at):
                    return None
                return replace(_stripped(found), status="used", run_id=run_id)

    def take_again(self, plan: Approval, run_id: str, repeated: str) -> Approval | None:
        """Hand an approval that a run has used on to the run that repeats it, because its process died."""
        statement = "update approvals set run_id = ? where owner = ? and id = ? and status = 'used' and run_id = ?"
        with within(_PATIENCE), self.database.transaction() as transaction:
            found = self._of_plan(transaction, plan, "used", "and run_id = ?", (repeated,))
            is_taken = found and transaction.write(statement, (run_id, self.owner, found.id, repeated))
            return found if is_taken else None

    def accept(self, asked: Approval, run_id: str, *, by: str, how: str, now: int) -> Approval:
        """Store the owner's approval of an open question, and use it for the run that waits.

        If another run used it in the meantime, this run gets an approval of its own. A denial stays a denial.
        """
        with within(_PATIENCE), self.database.transaction() as transaction:
            found = _current(self._found(transaction, asked.id), now)
            if found.status in {"expired", "denied"}:
                said = "waited too long" if found.status == "expired" else "was answered with no meanwhile"
                raise Denied(
                    f"The question about {found.identity} {said}. Nothing was done.",
                    suggestion="Do not call it again as it is; tell the owner what it was for, and go on without it.",
                    approval_id=found.id,
                    status=found.status,
                )
            if found.status == "used":
                expires_at = now + asked.expires_at - asked.created_at
                found = replace(asked, id=new_run(now)[0], created_at=now, expires_at=expires_at)
                found = self._add(transaction, replace(found, status="approved"))
            transaction.write(_DECIDE, ("approved", now, clean(by), how, "", self.owner, found.id))
            self._use(transaction, found, run_id, now)
            answered = replace(_stripped(found), decided_at=now, decided_by=clean(by), decided_how=how)
            return replace(answered, status="used", run_id=run_id)

    def denied(self, plan: Approval, since: int) -> Approval | None:
        """Return the owner's no to the same plan, if it was said after a time, and no yes was since."""
        decided = "and decided_at > ?"
        found = self._of_plan(self.database, plan, "denied", decided, (since,))
        if found is None:
            return None
        yeses = (self._of_plan(self.database, plan, one, decided, (found.decided_at,)) for one in _YESES)
        return None if any(yeses) else found

    def unfinished(self, plan: Approval) -> str:
        """Return the run that used up the last approval of a plan and is not known to have ended; else nothing."""
        known = self._of_plan(self.database, plan, "used")
        if known is None or not known.run_id:
            return ""
        with within(_PATIENCE):
            has_ended = self.database.read(
                "select 1 from runs where id = ? and status not in ('started', 'unknown')", (known.run_id,)
            )
        return "" if has_ended else known.run_id

    def decide(
        self, wanted: str, status: Literal["approved", "denied"], *, by: str, how: str, now: int, reason: str = ""
    ) -> Approval:
        """Answer a question, also otherwise than before; what was used, or waited too long, stays as it is."""
        with within(_PATIENCE), self.database.transaction() as transaction:
            self._tidy(transaction, now)
            found = self._found(transaction, wanted)
            if found.status == status:
                return found
            is_late = found.status == "denied" and found.expires_at <= now
            if is_late or found.status not in _ANSWERABLE:
                raise Conflict(
                    f"The question {found.id} is {'expired' if is_late else found.status} already.",
                    suggestion="Let the call be made again: then it is asked anew.",
                    approval_id=found.id,
                    status=found.status,
                )
            values = (status, now, clean(by), how, clean(reason))
            transaction.write(_DECIDE, (*values, self.owner, found.id))
            if status == "denied":
                found = self._strip(transaction, found)
            return replace(
                found, status=status, decided_at=now, decided_by=clean(by), decided_how=how, reason=clean(reason)
            )

    def get(self, wanted: str, now: int) -> Approval:
        """Return the approval with this number or id, or the only one with an id that starts with it."""
        with within(_PATIENCE):
            return _current(self._found(self.database, wanted), now)

    def list(
        self, now: int, *, status: ApprovalStatus | None = None, actor: str | None = None, limit: int = 20
    ) -> Sequence[Approval]:
        """Return questions, the newest first: those of one status, of one actor, or all."""
        values: list[Value] = []
        where = ""
        if status is not None:
            where, values = f"and {_NOW} = ?", [now, status]
        if actor is not None:
            where, values = f"{where} and actor = ?", [*values, clean(actor)]
        with within(_PATIENCE):
            rows = self.database.read(f"{_READ} {where} order by id desc limit ?", (self.owner, *values, limit))
        return tuple(_current(_read(row, Approval), now) for row in rows)

    def is_awaited(self) -> bool:
        """Whether a thread waits for an approval."""
        statement = "select 1 from threads where owner = ? and status = 'waiting' and waits_for = 'approval' limit 1"
        with within(_PATIENCE):
            return bool(self.database.read(statement, (self.owner,)))

    def unknown(self, digests: Collection[str]) -> tuple[str, ...]:
        """Return those of some digests that the owner never let run."""
        statement = "select 1 from first_runs where owner = ? and digest = ?"
        with within(_PATIENCE):
            return tuple(one for one in digests if not self.database.read(statement, (self.owner, one)))

    def rules(self) -> Sequence[ApprovalRule]:
        """Return the owner's rules, the oldest first."""
        with within(_PATIENCE):
            rows = self.database.read(f"{_READ_RULES} order by id", (self.owner,))
        return tuple(_read(row, ApprovalRule) for row in rows)

    def add_rule(self, rule: ApprovalRule) -> ApprovalRule:
        """Keep a rule, or return the one that says the same already."""
        with within(_PATIENCE), self.database.transaction() as transaction:
            known = [_read(row, ApprovalRule) for row in transaction.read(_READ_RULES, (self.owner,))]
            for one in known:
                if replace(one, id=rule.id, created_at=rule.created_at, created_by=rule.created_by) == rule:
                    return one
            if len(known) >= MOST_RULES:
                raise Conflict(f"There are {MOST_RULES:,} rules.", suggestion="Remove those that are not in use.")
            transaction.write(_ADD_RULE, (self.owner, *_row(rule)))
            return rule

    def remove_rule(self, wanted: str) -> ApprovalRule:
        """Take a rule back, and return it."""
        with within(_PATIENCE), self.database.transaction() as transaction:
            rows = transaction.read(f"{_READ_RULES} and id >= ? and id < ?", (self.owner, *id_range(wanted)))
            if len(rows) != 1:
                raise ApprovalNotFound(wanted, what="rule", is_several=bool(rows))
            rule = _read(rows[0], ApprovalRule)
            transaction.write("delete from approval_rules where owner = ? and id = ?", (self.owner, rule.id))
            return rule

    def _use(self, transaction: Transaction, found: Approval, run_id: str, now: int) -> bool:
        """Use an approval up, and know from then on what was looked at with it; say whether it was there to be used."""
        if not transaction.write(_USE, (run_id, self.owner, found.id, now)):
            return False
        self._strip(transaction, found)
        for digest in found.first_runs:
            transaction.write(_KNOW, (self.owner, digest, found.id, now))
        return True

    def _tidy(self, transaction: Transaction, now: int) -> None:
        for row in transaction.read(_OVERDUE, (self.owner, now, _STEP)):
            found = self._strip(transaction, _read(row, Approval))
            transaction.write(_EXPIRE, (self.owner, found.id))
        transaction.write(_PRUNE, (self.owner, now - _KEPT_MS, _STEP))

    def _strip(self, transaction: Transaction, found: Approval) -> Approval:
        """Forget the parameters of a question that is over, and return the rest of it."""
        rest = _stripped(found)
        kept = (json_column(rest.plan), rest.preview, json_column(rest.request))
        transaction.write(_STRIP, (*kept, self.owner, found.id))
        return rest

    def _of_plan(
        self, source: Database | Transaction, plan: Approval, status: str, more: str = "", values: Sequence[Value] = ()
    ) -> Approval | None:
        """Return the latest question about a plan that has a status, and is not expired where it could be."""
        alive = "and expires_at > ?" if status in {"pending", "approved"} else ""
        given = (self.owner, clean(plan.actor), clean(plan.project), plan.plan_digest, status, *values)
        with within(_PATIENCE):
            rows = source.read(
                f"{_READ} {_PLAN} and status = ? {more} {alive} order by id desc limit 1",
                (*given, plan.created_at) if alive else given,
            )
        return _read(rows[0], Approval) if rows else None

    def _found(self, source: Database | Transaction, wanted: str) -> Approval:
        if wanted.isdecimal() and not wanted.startswith("0") and len(wanted) <= _LONGEST_NUMBER:
            rows = source.read(f"{_READ} and number = ?", (self.owner, int(wanted)))
        else:
            statement = f"{_READ} and id >= ? and id < ?"
            values = (self.owner, *id_range(wanted))
            rows = source.read(f"{statement} limit 2", values)
            if len(rows) > 1:  # of several, the one that still waits is meant
                rows = source.read(f"{statement} and status = 'pending' limit 2", values) or rows
        if len(rows) != 1:
            raise ApprovalNotFound(wanted, is_several=bool(rows))
        return _read(rows[0], Approval)


def _stripped(approval: Approval) -> Approval:
    """Return a question without the parameters of its call; nothing in them can begin a line of the words."""
    lines = (line for line in approval.preview.split("\n") if not line.startswith(INPUT_MARK))
    preview = "\n".join(_UNKEPT if line.startswith(_INPUTS) else line for line in lines)
    plan = {word: approval.plan[word] for word in _LASTING if word in approval.plan}
    return replace(approval, plan=plan, preview=preview, request=None)


def _current(approval: Approval, now: int) -> Approval:
    """Return a question as it stands now: one that was not answered or used in time is expired."""
    is_over = approval.status in {"pending", "approved"} and approval.expires_at <= now
    return replace(approval, status="expired") if is_over else approval


def _row(stored: Approval | ApprovalRule) -> Sequence[Value]:
    row: list[Value] = []
    for name, value in to_builtins(stored).items():
        if name in _JSON:
            row.append(json_column(value))
        elif isinstance(value, str) and name != "preview":
            row.append(clean(value))
        else:  # the preview is already limited in length and plain text when it is made
            row.append(value)
    return row


def _read(row: Row, kind: type[_Kind]) -> _Kind:
    cells = zip(kind.__struct_fields__, row, strict=True)
    return convert({name: json.loads(str(value)) if name in _JSON else value for name, value in cells}, kind)
