"""`Recorder`, `CallRecord`, `Run`, `AuditHead`: run row, receipt, output file, written in one place."""

from __future__ import annotations

import asyncio
import json
import re
import time
from asyncio import CancelledError, to_thread
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Self

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from kiwi_mcp.domain.calls import Call, CallJournal, Space
from kiwi_mcp.domain.errors import (
    ApprovalRequired,
    ApprovalsWaiting,
    Denied,
    Internal,
    InvalidArguments,
    InvalidManifest,
    InvalidRequest,
    KiwiError,
    LeaseLost,
    PolicyDenied,
    StoreDamaged,
    StoreUnavailable,
    ThreadEnded,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan, ReadSpec
from kiwi_mcp.domain.records import ApprovedBy, AuditLevel, Effects, Receipt, ReceiptHead, RunRecord, RunStatus
from kiwi_mcp.domain.times import iso
from kiwi_mcp.kernel.checkpoints import checkpoint
from kiwi_mcp.kernel.paths import AUDIT_KEY, outputs_home
from kiwi_mcp.kernel.prepared import Prepared
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.verb import Answer, Verb
from kiwi_mcp.kernel.verbs import BY_NAME
from kiwi_mcp.manifest.names import short
from kiwi_mcp.manifest.owner_file import changing
from kiwi_mcp.manifest.signatures import canonical
from kiwi_mcp.policy.approval_rules import effect_of, effects_of
from kiwi_mcp.primitives.process.spawn import completed
from kiwi_mcp.primitives.secrets.key_storage import Mac
from kiwi_mcp.primitives.secrets.redaction import redact
from kiwi_mcp.store.database import LONGEST
from kiwi_mcp.store.open import masked
from kiwi_mcp.store.outputs import INLINE_LIMIT, Retention, StoredOutput, keep, preview, result_text, rewrite, shorten
from kiwi_mcp.store.receipts import Receipts
from kiwi_mcp.store.runs import EndedRun, Runs, new_run

FILE, KEY = "state/audit.head", AUDIT_KEY
_PERIOD = 5.0
"""For how many seconds a receipt may be without its place in the head; its place in the store it has at once."""
_LARGEST = 1_000_000


class AuditHead:
    """The file that remembers the ends of chains: written in the background, and when the kernel ends."""

    def __init__(self, user: Path, store: Store) -> None:
        self._path = user / FILE
        self._mac = Mac(user / KEY)
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._saving: asyncio.Task[None] | None = None

    def note(self) -> None:
        """Note that a receipt was added: its place is kept within seconds."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(_PERIOD, self._begin)

    def _begin(self) -> None:
        if self._loop is not None:
            self._saving = self._loop.create_task(asyncio.to_thread(self._save))
            self._loop = None

    async def aclose(self) -> None:
        """Keep the place of what was added since."""
        if self._saving is not None and self._saving.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({self._saving})
        if self._loop is not None:
            self._loop = self._saving = None
            await asyncio.to_thread(self._save)

    def _save(self) -> None:
        # The receipts are in the store; what cannot be saved here is saved the next time, or `verify` reports it.
        with suppress(KiwiError):
            receipts = self._store.receipts()
            with changing(self._path) as write:
                heads, head = self._read(), receipts.settled_head()
                # A chain that is not the one that was kept is not kept in its place: `verify` has to find it.
                if receipts.holds(heads.get(receipts.url, ReceiptHead())):
                    ends = {**heads, receipts.url: head}.items()
                    stores: JsonObject = {url: {"count": one.count, "hash": one.hash} for url, one in ends}
                    mac = self._mac.of(canonical(stores))
                    write(json.dumps({"stores": stores, "mac": mac}, indent=1).encode())

    def issues(self, receipts: Receipts) -> tuple[Issue, ...]:
        """Return what the kept end of a chain says against it."""
        fix = f"Compare the store with a backup or an export. To begin anew from what is there, remove {self._path}."
        try:
            kept = self._read().get(receipts.url)
        except KiwiError as error:
            return (Issue("the end of the chain", error.message, fix),)
        if kept is None:
            reason = f"{self._path} does not know it, so receipts may have been cut off unseen"
            issue = Issue("the end of the chain", reason, "The next call that is made notes it.")
            return (issue,) if receipts.after(0, 1) else ()
        if receipts.holds(kept):
            return ()
        reason = f"receipt {kept.count} was its end and is gone, or is another one: the end was cut off or replaced"
        return (Issue("the end of the chain", reason, fix),)

    def _read(self) -> Mapping[str, ReceiptHead]:
        """Return the end of the chain of each store, by its URL."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_LARGEST)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreUnavailable(
                f"{self._path} cannot be read: {error.strerror or error}.", suggestion="Make it readable."
            ) from error
        try:
            written = as_object(json.loads(data))
        except (ValueError, RecursionError):
            written = {}
        stores = as_object(written.get("stores"))
        if not self._mac.fits(canonical(stores), as_text(written.get("mac"))):
            raise StoreDamaged(
                f"{self._path} was changed by another program, or is damaged.",
                suggestion="Check the receipts against a backup, then remove the file.",
            )
        return {url: _head(as_object(one)) for url, one in stores.items()}


def _head(written: JsonObject) -> ReceiptHead:
    count = written.get("count")
    return ReceiptHead(count if isinstance(count, int) else 0, as_text(written.get("hash")))


_SEARCHES = frozenset({"search", "load"})
"""Verbs that only look, and are written down all the same: what is looked for is part of what a model does."""
_NAMES = (
    "item_id", "approval_id", "rule_id", "server", "name", "remote", "task_id", "run_id", "path", "client", "tool_id",
    "item", "publisher", "key",
)  # fmt: skip
"""The words by which requests name what they are about, the most telling first."""
_LONGEST_NAME = 200
_SECRET_NAME = re.compile(
    rb"(?i)(?:passw|passphrase|secret|token|api[_-]?key|credential|authorization|private[_-]?key|cookie).{0,60}\Z",
    re.DOTALL,
)
_LONGEST_SECRET_NAME = 80
_DENIED = frozenset({PolicyDenied.code, Denied.code, ApprovalRequired.code, ApprovalsWaiting.code})


class CallRecord(Struct):
    """One call, from its request to its receipt."""

    action: str
    payload: JsonObject
    surface: str
    level: Callable[[], AuditLevel]
    """Says how much the receipt tells."""
    needs_receipt: bool
    """Whether the call is refused where its receipt cannot be written."""
    is_written: bool = False
    """Whether its receipt was given for the run that the call left, and so must not be written again."""
    is_begun: bool = False
    """Whether the call is stored as started."""
    has_run: bool = False
    """Whether the call leaves a run, which is begun by itself."""
    began: int = field(default_factory=time.time_ns)
    name: tuple[str, str] | None = None
    """Its id and time, if the call leaves no run; the receipt of a run has the id and time of the run."""

    @property
    def is_of_look(self) -> bool:
        """Whether the call changes nothing."""
        return self.action in _SEARCHES

    def of_run(
        self, run: RunRecord, secrets: Mapping[str, str] | None, outcome: bytes | None, detail: JsonObject
    ) -> Receipt:
        """Return the receipt of a call that left a run.

        `secrets` are those of the plan, None where the call was refused before they were known: then its arguments
        may hold one of them. `outcome` is what came of it, without secrets already; `detail` names the rule or the
        approval by which it continued.
        """
        self.is_written = True
        level = self.level()
        arguments = None if level == "minimal" or secrets is None else self._arguments(secrets)
        written = compact(detail) if detail else ""
        if level == "verbose":
            message: JsonObject = {"message": run.message} if run.message else {}
            written = _detail({"project": run.project, **message, **detail}, arguments, secrets or {})
        return Receipt(
            id=run.id,
            at=run.started_at,
            actor=run.actor,
            surface=self.surface,
            action=self.action,
            item=run.tool_id,
            status=run.status,
            level=level,
            code=run.code,
            identity=run.identity,
            digest=run.digest,
            plan_digest=run.plan_digest,
            verdict="deny" if run.code in _DENIED else "allow" if run.plan_digest else "",
            arguments_sha256=sha256(arguments).hexdigest() if arguments is not None else "",
            outcome_sha256=sha256(outcome).hexdigest() if outcome is not None and level != "minimal" else "",
            duration_ms=run.duration_ms,
            cost_micros=run.cost_micros,
            detail=written,
        )

    def of_answer(self, actor: str, status: RunStatus, answer: JsonObject) -> Receipt:
        """Return the receipt of a call that left no run, from what was answered to it."""
        level, code = self.level(), as_text(answer.get("code"))
        began = self.began // 1_000_000
        self.name = self.name or new_run(began)
        arguments = None if level == "minimal" else self._arguments({})
        # What the owner accepted without a trusted signature is stored at every level.
        accepted = as_list(answer.get("acknowledged"))
        detail = compact({"acknowledged": accepted}) if accepted else ""
        if len(detail) > LONGEST:
            detail = compact({"acknowledged": len(accepted)})
        return Receipt(
            id=self.name[0],
            at=self.name[1],
            actor=actor,
            surface=self.surface,
            action=self.action,
            item=self._item() or as_text(answer.get("tool_id")),
            status=status,
            level=level,
            code=code,
            identity=as_text(answer.get("identity")),
            digest=as_text(answer.get("digest")) or as_text(answer.get("hash")),
            verdict="deny" if code in _DENIED else "allow" if status == "success" else "",
            arguments_sha256=sha256(arguments).hexdigest() if arguments is not None else "",
            duration_ms=max(0, time.time_ns() // 1_000_000 - began),
            detail=detail,
        )

    def _item(self) -> str:
        """Return the short name of what a request is about, as far as it names anything."""
        named = {**as_object(self.payload.get("parameters")), **self.payload}
        for word in _NAMES:
            if text := as_text(named.get(word)):
                return masked(short(text) if word == "item_id" else text)[:_LONGEST_NAME]
        return ""

    def _arguments(self, secrets: Mapping[str, str]) -> bytes | None:
        """Return the canonical arguments; None if they may contain a secret, which could be guessed from a hash.

        Only `execute` has `parameters`, and the verbs that read have a query or a name. The arguments of other verbs
        are not stored, as they may contain anything.
        """
        try:
            data = canonical(self.payload if self.action in _SEARCHES else self.payload["parameters"])
        except (KeyError, InvalidRequest):
            return None
        if names_secret(data) or (secrets and redact(text := data.decode(), secrets) != text):
            return None
        return data


def names_secret(data: bytes) -> bool:
    """Whether a key in some JSON, or what looks like one, says that its value is a secret."""
    # From the end of each key back to its beginning: a long text between two keys is not gone through letter by letter.
    for before in data.split(b'":')[:-1]:
        if _SECRET_NAME.search(before.rpartition(b'"')[2][-_LONGEST_SECRET_NAME:]):
            return True
    return False


def _detail(answer: JsonObject, arguments: bytes | None, secrets: Mapping[str, str]) -> str:
    """Return more words as JSON that can be kept whole: without the arguments, or none, where they are too long."""
    sent: Json = "not kept: they may hold a secret" if arguments is None else json.loads(arguments)
    for one in (sent, "not kept: they are too long"):
        text = redact(compact({**answer, "arguments": one}), secrets)
        if len(text) <= LONGEST:
            return text
    return ""


def action_of(verb: str, declared: Verb | None, payload: JsonObject) -> str:
    """Return the action in the receipt of a request, empty where it leaves none; an unknown verb has no `declared`."""
    action = ""
    if payload.get("dry_run") is not True:
        if declared is not None:
            is_recorded = declared.records(payload) if callable(declared.records) else declared.records
            action = declared.receipt if is_recorded else ""
        elif verb in BY_NAME:  # with an action that does not exist; `execute` alone is recorded without it
            word = as_text(payload.get("action"))
            is_word = word.isidentifier() and len(word) < _LONGEST_NAME
            action = f"{verb} {word}" if is_word and verb != "execute" else verb
    return action or (verb if verb in _SEARCHES else "")


class RunWriter:
    """Writes the runs of one kernel; those that end in one turn of the event loop share a transaction."""

    def __init__(self) -> None:
        self.under_way = 0
        """How many runs have begun and not ended."""
        self._waiting: list[tuple[Runs, EndedRun, asyncio.Future[bool]]] = []

    async def write(self, runs: Runs, ended: EndedRun, data: bytes | None) -> None:
        """Write a run that has ended; it is written although the task that waits for it is cancelled."""
        if data is None and self.under_way <= 1 and runs.record_now([ended]):
            return
        await completed(self._write(runs, ended, data))

    async def _write(self, runs: Runs, ended: EndedRun, data: bytes | None) -> None:
        is_alone = ended.also is not None or self.under_way <= 1
        if data is None and not is_alone:
            loop = asyncio.get_running_loop()
            if not self._waiting:
                loop.call_soon(self._flush)
            is_written: asyncio.Future[bool] = loop.create_future()
            self._waiting.append((runs, ended, is_written))
            if await is_written:
                return
        if ended.is_begun or ended.also is not None:
            await to_thread(runs.finish, ended, data)
        else:
            await to_thread(runs.add, ended.run, data, ended.receipt)

    def _flush(self) -> None:
        """Write all that waits; what could not be written together is written by itself, each where it waits."""
        waiting, self._waiting = self._waiting, []
        first = waiting[0][0]
        together = [one for one in waiting if one[0].is_beside(first)]
        is_written = False
        try:
            is_written = first.record_now([ended for _, ended, _ in together])
        except KiwiError:
            pass
        finally:  # also after a fault of ours: a run that waits here could not even be cancelled
            for one in waiting:
                one[2].set_result(is_written and one in together)


class Recorder:
    """The receipts of one kernel's calls, as they are written."""

    def __init__(self, user: Path, store: Store, surface: str) -> None:
        self.head = AuditHead(user, store)
        self._store = store
        self._surface = surface
        self.writer = RunWriter()
        self.kernel_lock = store.kernel_lock

    def call(self, verb: str, declared: Verb | None, payload: JsonObject) -> CallRecord | None:
        """Return the record of a call, before its request is parsed; None for a call that leaves no receipt."""
        if not (action := action_of(verb, declared, payload)):
            return None
        needed = declared.needs_receipt if declared is not None else False
        needs_receipt = needed(payload) if callable(needed) else needed
        return CallRecord(
            action, payload, self._surface, self._store.audit_level, needs_receipt, has_run=action == "run"
        )

    def sketch(self, call: Call) -> Run:
        """Return a run that is planned and judged, and never begun or recorded."""
        return Run(call, _SKETCH, self, None, None)

    async def begin(self, record: CallRecord, actor: str) -> None:
        """Store that a call starts which changes something and leaves no run, before it changes anything.

        Where that cannot be done, a call that needs a receipt is refused.
        """
        try:
            receipt = record.of_answer(actor or self._store.actor.name, "started", {})
            record.is_begun = True  # also where it is cancelled on the way
            store, kernel = self._store, self._store.kernel_lock.name
            await completed(asyncio.to_thread(lambda: store.receipts().begin(receipt, kernel())))
        except KiwiError:
            record.is_begun = False
            if record.needs_receipt:
                raise

    async def enter(self, record: CallRecord, answer: Answer, actor: str) -> Answer:
        """Write a call down that left no run, and return its answer, which tells if that could not be done."""
        if record.is_written:
            self.head.note()
        if record.is_written or (answer.content.get("status") == "planned" and not record.is_begun):
            return answer
        try:
            await self._write(record, _status(answer), answer.content, actor)
        except KiwiError as reason:
            known = as_list(answer.content.get("warnings"))
            response = _missing(record, answer, reason)
            warnings = known if response in known else [*known, response]
            return replace(answer, content={**answer.content, "warnings": warnings})
        return answer

    async def enter_cancelled(self, record: CallRecord, actor: str) -> None:
        """Write a call down that was cancelled before it left a run."""
        # A task that was cancelled may be so again while it waits; the thread writes the receipt all the same.
        if not record.is_written:
            with suppress(KiwiError, asyncio.CancelledError):
                await self._write(record, "cancelled", {"code": "cancelled"}, actor)

    async def _write(self, record: CallRecord, status: RunStatus, answer: JsonObject, actor: str) -> None:
        receipt = record.of_answer(actor or self._store.actor.name, status, answer)
        is_begun, is_of_look = record.is_begun, record.is_of_look

        def write() -> None:
            receipts = self._store.receipts()
            if is_begun:
                receipts.finish(receipt)
            elif not (is_of_look and receipts.add_now(receipt)):
                receipts.add(receipt)

        # Verbs that read answer sooner without a switch to another thread and back.
        opened = self._store.receipts_if_open() if is_of_look else None
        if opened is None or not opened.add_now(receipt):
            await asyncio.to_thread(write)
        self.head.note()

    async def aclose(self) -> None:
        """Keep the place of what was written."""
        await self.head.aclose()


def _missing(record: CallRecord, answer: Answer, reason: KiwiError) -> str:
    """Return the message for a receipt that could not be written."""
    if record.is_of_look and isinstance(reason, InvalidManifest):  # the settings: the caller may need to know
        return f"{reason.message} {reason.suggestion}"
    response = "No receipt was written" if answer.is_error else "It was done, and no receipt of it was written"
    return f"{response}: {reason.message}"


def _status(answer: Answer) -> RunStatus:
    if not answer.is_error:
        return "success"
    return "error" if answer.content.get("code") == Internal.code else "refused"


_RETENTION = Retention()
_SKETCH = StoreUnavailable("A plan that is only shown is not recorded.", suggestion="Run it.")


class Run:
    """One call of one item on its way through the pipeline: what it became, and what is recorded of it.

    As a block it is recorded however it ends; `runs` may be why it cannot be.
    """

    prepared: Prepared
    chain: Chain
    """The item and all it runs on."""
    plan: Plan
    outcome: Outcome

    def __init__(
        self,
        call: Call,
        runs: Runs | KiwiError,
        recorder: Recorder,
        record: CallRecord | None,
        journal: CallJournal | None,
    ) -> None:
        self.call = call
        self._journal = journal
        self._recorder = recorder
        self._runs = runs
        self._record = record
        self._is_begun = self.is_finished = False
        self.digest = ""
        """The digest of the plan; empty before there is one."""
        self.judged_inputs: JsonObject | None = None
        """The inputs that conditions are judged by; None where they only fill the places of real ones."""
        self.secrets: Mapping[str, str] | None = None
        """The secrets of the plan, once they are known."""
        self.approved_by: ApprovedBy | None = None
        """The rule or the approval, where the plan needed one."""
        self.checkpoint: checkpoint.Guard | None = None
        """What is saved around the run, so that it can be undone; None where nothing is."""
        self.duration_ms = 0
        self.output: StoredOutput | None = None
        """The output file in the project, if it could be written."""
        self.is_recorded = False
        """Whether the run is in the store."""
        self.response: JsonObject = {}
        """The part of a response that carries the result."""
        self._faults: list[str] = []
        self._began = time.monotonic()
        new_id, self._started_at = new_run(time.time_ns() // 1_000_000)
        self.id = call.run_id or new_id

    async def __aenter__(self) -> Self:
        self._recorder.writer.under_way += 1
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and not self.is_finished:  # it gave no outcome; that is recorded, and the error raised
                await self.record_ending(error)
        finally:
            self._recorder.writer.under_way -= 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the owner should know: of the item, of the plan, and of what could not be saved or recorded."""
        found = self.outcome.warnings if self.is_finished else ()
        unsaved = self.checkpoint.warnings if self.checkpoint is not None else ()
        return (*self.prepared.warnings, *self.plan.warnings, *unsaved, *found, *self._faults)

    async def begin(self) -> None:
        """Store a run that changes or sends something, and every run of a thread, as `started`.

        Nothing starts where that cannot be done.

        The tool's clock starts here: the time that the owner took to answer is not the tool's.
        """
        is_of_thread = self._journal is not None and not isinstance(self.plan.spec, ReadSpec)
        if is_of_thread or effects_of(self.plan, self.chain) != Effects():
            await self._begin()
        self._began = time.monotonic()

    async def _begin(self) -> None:
        if not isinstance(self._runs, Runs):
            raise _not_started(self._runs)
        run, receipt = self._rows("started", "", "", 0)
        if self._record:
            self._record.is_written = False  # it is written when the run ends
        self._is_begun = True  # also where it is cancelled on the way
        try:
            kernel = self._recorder.kernel_lock.name()
            journal = self._journal
            run_id, plan, chain = self.id, self.plan, self.chain
            also = (lambda written: journal.began(written, run_id, effect_of(plan, chain))) if journal else None
            if not self._runs.begin_now(run, receipt, kernel, also):
                await completed(to_thread(self._runs.begin, run, receipt, kernel, also))
        except LeaseLost:
            raise
        except KiwiError as reason:
            raise _not_started(reason) from reason

    async def record_ending(self, error: BaseException) -> None:
        """Record a call that gave no outcome."""
        if not isinstance(self._runs, Runs):
            return
        status, code, message = _ending(error)
        duration_ms = round((time.monotonic() - self._began) * 1_000)
        run, receipt = self._rows(status, code, redact(message, self.secrets or {}), duration_ms)
        with suppress(CancelledError):
            try:
                await self._recorder.writer.write(self._runs, EndedRun(run, receipt, self._is_begun), None)
            except KiwiError:
                if self._record:
                    self._record.is_written = False

    async def finish(self, outcome: Outcome) -> Run:
        """Record what happened; what cannot be recorded becomes a warning, and the result is given all the same."""
        self.is_finished = True
        self.outcome, self.duration_ms = outcome, round((time.monotonic() - self._began) * 1_000)
        text = result_text(outcome.result)
        data, is_large = text.encode(errors="surrogatepass"), len(text) > INLINE_LIMIT
        record = self._write_output()
        code: str = "" if outcome.is_success else outcome.status
        code = "execution_failed" if code == "error" else code
        run, receipt = self._rows(outcome.status, code, outcome.message, self.duration_ms, data, is_large=is_large)
        self.response = shorten(outcome.result, self.output, text) if is_large else {"result": outcome.result}
        journal = self._journal
        also = (lambda written: journal.ended(written, self.id, outcome, self.response)) if journal else None
        ended, stored, runs = EndedRun(run, receipt, self._is_begun, also), data if is_large else None, self._runs
        try:
            if not isinstance(runs, Runs):
                raise runs
            try:
                await self._recorder.writer.write(runs, ended, stored)
            except (LeaseLost, ThreadEnded):  # another process has the thread: the run is recorded without its event
                await self._recorder.writer.write(runs, replace(ended, also=None), stored)
        except KiwiError as reason:
            self._faults.append(f"The run was not recorded: {reason.message}")
            return self
        self.is_recorded = True
        if self.output and is_large:
            # The file holds the whole result until the store does, so that there is no moment without it.
            shown: JsonObject = {**record, **preview(text), "result_sha256": run.result_sha256}
            with suppress(OSError):
                rewrite(outputs_home(_home(self.call.space), self.call.space.user), self.output, shown)
        return self

    def _rows(
        self,
        status: RunStatus,
        code: str,
        message: str,
        duration_ms: int,
        outcome: bytes | None = None,
        *,
        is_large: bool = False,
    ) -> tuple[RunRecord, Receipt | None]:
        """Return what is stored of the run, and its receipt; `outcome` is the result as its pages show it."""
        is_bound, is_done = bool(self.digest), outcome is not None
        run = RunRecord(
            id=self.id,
            tool_id=self.chain.tool.id if is_bound else self.call.tool_id,
            status=status,
            started_at=self._started_at,
            duration_ms=duration_ms,
            actor=self._runs.actor if isinstance(self._runs, Runs) else "",
            project=str(self.call.space.project),
            identity=self.plan.identity if is_bound else "",
            digest=self.plan.tool_digest if is_bound else "",
            plan_digest=self.digest,
            code=code,
            message=message,
            exit_code=self.outcome.exit_code if is_done else None,
            cost_micros=self.outcome.cost.micros if is_done else 0,
            output=self.output.handle if self.output else "",
            result_sha256=sha256(outcome).hexdigest() if outcome is not None and is_large else None,
            result_size=len(outcome) if outcome is not None and is_large else None,
        )
        if self._record is None:
            return run, None
        if not isinstance(self._runs, Runs):
            self._record.is_written = True  # that there is no receipt either is reported once
            return run, None
        detail: JsonObject = self.approved_by.to_json() if self.approved_by else {}
        if self.call.origin.thread or self.call.origin.run:
            detail = {**detail, **{name: value for name, value in asdict(self.call.origin).items() if value}}
        if is_done and (self.outcome.sent or self.outcome.details.keys() & {"network", "quarantine"}):
            detail = {**detail, **_traces(self.outcome)}
        return run, self._record.of_run(run, self.secrets, outcome, detail)

    def _write_output(self) -> JsonObject:
        """Write the record as a file, and return it; where no file can be written, the result is given all the same."""
        outcome, space, tool_id = self.outcome, self.call.space, self.chain.tool.id
        record: JsonObject = {
            "tool_id": tool_id,
            "run_id": self.id if isinstance(self._runs, Runs) else None,
            "identity": self.plan.identity,
            "digest": self.plan.tool_digest,
            "plan_digest": self.digest,
            "status": outcome.status,
            "result": outcome.result,
            "message": outcome.message,
            "exit_code": outcome.exit_code,
            "details": {**outcome.details, "network": outcome.sent} if outcome.sent else outcome.details,
            "logs": outcome.logs.to_json(),
            "finished_at": f"{iso(time.time_ns() // 1_000_000)[:-1]}+00:00",
            "execution_time_ms": self.duration_ms,
        }
        own = _home(space)
        home = outputs_home(own, space.user)
        try:
            kept = keep(home, tool_id, record, now=datetime.now(UTC), retention=_RETENTION)
            self.output = kept if home is own else replace(kept, path=str(home.parent / kept.path))
        except OSError as error:
            self._faults.append(f"The output could not be kept: {error.strerror or error}.")
        return record


@lru_cache(maxsize=64)
def _home(space: Space) -> Path:
    return space.project_ai


_ROOM = 1_000
"""How much of a receipt the hosts that a process reached may take, in characters."""


def _traces(outcome: Outcome) -> JsonObject:
    """Return what a receipt says about network and quarantine: the sums, and as many hosts as have room."""
    found: dict[str, Json] = {}
    if network := outcome.details.get("network") or outcome.sent:
        hosts = rows = as_list(as_object(network).get("hosts"))
        while len(compact(hosts)) > _ROOM:
            hosts = hosts[: len(hosts) // 2]
        left_out = {"left_out": len(rows) - len(hosts)} if len(hosts) < len(rows) else {}
        found["network"] = {**as_object(network), "hosts": hosts, **left_out}
    quarantine = outcome.details.get("quarantine")
    if quarantine and (count := as_object(quarantine).get("count")):
        found["quarantined"] = count
    return found


def _not_started(reason: KiwiError) -> StoreUnavailable:
    return StoreUnavailable(
        f"Nothing ran: what changes or sends something is recorded before it starts. {reason.message}",
        suggestion=reason.suggestion,
    )


def _ending(error: BaseException) -> tuple[RunStatus, str, str]:
    """Return how a call ended that gave no outcome: the status, the code and the sentence for its record."""
    match error:
        case InvalidArguments():  # its message quotes the parameters, and those are not recorded
            return "refused", error.code, f"Parameters that do not fit: {', '.join(one.place for one in error.issues)}."
        case KiwiError():
            return "refused", error.code, error.message
        case CancelledError():
            return "cancelled", "cancelled", "The call was cancelled."
        case _:
            return "error", "internal", "Something went wrong inside Kiwi."
