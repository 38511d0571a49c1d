"""The trail of a call: what it leaves behind, however it ends."""

from __future__ import annotations

import time
from asyncio import CancelledError, to_thread
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from kiwi_mcp.domain.call import Call, Space
from kiwi_mcp.domain.errors import InvalidArguments, KiwiError
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, compact
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.domain.receipt import Receipt
from kiwi_mcp.domain.run import Run, RunStatus, iso
from kiwi_mcp.kernel.approvals.gate import Passed
from kiwi_mcp.kernel.places import outputs_home
from kiwi_mcp.kernel.witness import Witness
from kiwi_mcp.manifest.digest import sha256_hex
from kiwi_mcp.primitives.secrets import redact
from kiwi_mcp.store.outputs import (
    INLINE_LIMIT,
    Kept,
    Retention,
    keep,
    preview,
    result_bytes,
    result_text,
    rewrite,
    shorten,
)
from kiwi_mcp.store.runs import Runs, new_run

Recorder: TypeAlias = Runs | KiwiError | None
"""Where runs are recorded; or why they cannot be; or None where nobody asked for it."""

_RETENTION = Retention()


@dataclass(frozen=True, slots=True)
class Left:
    """What a call that was made left behind."""

    duration_ms: int
    kept: Kept | None
    """The output file in the project, if it could be written."""
    run_id: str | None
    """The run in the store, if it could be recorded."""
    shown: JsonObject
    """The words of an answer that carry the result."""
    warnings: tuple[str, ...] = ()
    """What could not be kept, and why."""


class Trail:
    """A call on its way: a run in the store when it ends and, if it was made, a file in the project."""

    def __init__(self, call: Call, runs: Recorder, actor: str, witness: Witness | None = None) -> None:
        self.secrets: Mapping[str, str] | None = None
        """The secrets of the plan, once they are known."""
        self.passed: Passed | None = None
        """By what of the owner's the call went on, where the owner had to be asked."""
        self._sent: JsonObject = {}
        self._call = call
        self._runs = runs
        self._actor = actor
        self._witness = witness
        self._tool_id = call.tool_id
        self._identity = self._digest = self._plan_digest = ""
        self._begun = time.monotonic()
        self.run_id, self._started_at = new_run(time.time_ns() // 1_000_000)

    def set_out(self, tool_id: str, plan: Plan, digest: str) -> None:
        """Take down what is going to be done, from now on."""
        self._tool_id, self._plan_digest = tool_id, digest
        self._identity, self._digest = plan.identity, plan.tool_digest
        self._begun = time.monotonic()

    async def leave(self, error: BaseException) -> None:
        """Record a call that gave no outcome; that this fails must not hide the error itself."""
        if not isinstance(self._runs, Runs):
            return
        status, code, message = _ending(error)
        run = self._run(status, code, redact(message, self.secrets or {}), self._passed())
        # A task that was cancelled may be so again while it waits; the thread writes the record all the same.
        with suppress(CancelledError):
            try:
                await _add(self._runs, run, None, self._receipt(run, None))
            except KiwiError:
                if self._witness:
                    self._witness.is_heard = False

    async def finish(self, outcome: Outcome) -> Left:
        """Keep what happened; what cannot be kept is told, and the result is given all the same."""
        duration_ms, text, warnings = self._passed(), result_text(outcome.result), list[str]()
        data = result_bytes(text) if len(text) > INLINE_LIMIT else None
        record = self._record(outcome, duration_ms)
        kept = self._keep(record, warnings)
        self._sent = _sent(outcome)
        code = "" if outcome.is_success else _CODES.get(outcome.status, outcome.status)
        run = self._run(outcome.status, code, outcome.message, duration_ms, outcome.exit_code, kept, data)
        is_recorded = await self._store(run, data, text, warnings)
        if is_recorded and kept and data is not None:
            self._lighten(kept, {**record, **preview(text), "result_sha256": run.result_sha256})
        shown = shorten(outcome.result, kept, text)
        return Left(duration_ms, kept, run.id if is_recorded else None, shown, tuple(warnings))

    def _receipt(self, run: Run, outcome: bytes | None) -> Receipt | None:
        passed = {**(self.passed.to_json() if self.passed else {}), **self._sent}
        return self._witness.of_run(run, self.secrets, outcome, passed) if self._witness else None

    def _passed(self) -> int:
        return round((time.monotonic() - self._begun) * 1_000)

    def _run(
        self,
        status: RunStatus,
        code: str,
        message: str,
        duration_ms: int,
        exit_code: int | None = None,
        kept: Kept | None = None,
        data: bytes | None = None,
    ) -> Run:
        return Run(
            id=self.run_id,
            tool_id=self._tool_id,
            status=status,
            started_at=self._started_at,
            duration_ms=duration_ms,
            actor=self._actor,
            project=str(self._call.space.project),
            identity=self._identity,
            digest=self._digest,
            plan_digest=self._plan_digest,
            code=code,
            message=message,
            exit_code=exit_code,
            output=kept.handle if kept else "",
            result_sha256=None if data is None else sha256_hex(data),
            result_size=None if data is None else len(data),
        )

    def _record(self, outcome: Outcome, duration_ms: int) -> JsonObject:
        return {
            "tool_id": self._tool_id,
            "run_id": self.run_id if isinstance(self._runs, Runs) else None,
            "identity": self._identity,
            "digest": self._digest,
            "plan_digest": self._plan_digest,
            "status": outcome.status,
            "result": outcome.result,
            "message": outcome.message,
            "exit_code": outcome.exit_code,
            "details": {**outcome.details, "network": outcome.sent} if outcome.sent else outcome.details,
            "logs": outcome.logs.to_json(),
            "finished_at": f"{iso(time.time_ns() // 1_000_000)[:-1]}+00:00",
            "execution_time_ms": duration_ms,
        }

    def _keep(self, record: JsonObject, warnings: list[str]) -> Kept | None:
        """Keep the record as a file; a project that cannot be written loses the file, not the result."""
        space = self._call.space
        own = _home(space)
        home = outputs_home(own, space.user)
        try:
            kept = keep(home, self._tool_id, record, now=datetime.now(UTC), retention=_RETENTION)
        except OSError as error:
            warnings.append(f"The output could not be kept: {error.strerror or error}.")
            return None
        return kept if home is own else replace(kept, path=str(home.parent / kept.path))

    async def _store(self, run: Run, data: bytes | None, text: str, warnings: list[str]) -> bool:
        """Record the run with its receipt, and say whether that was done."""
        match self._runs:
            case None:
                return False
            case KiwiError() as reason:
                if self._witness:
                    self._witness.is_heard = True  # that there is no receipt either is told once
                warnings.append(_unrecorded(reason))
                return False
            case runs:
                receipt = self._receipt(run, data or result_bytes(text))
                try:
                    await _add(runs, run, data, receipt)
                except KiwiError as reason:
                    warnings.append(_unrecorded(reason))
                    return False
                return True

    def _lighten(self, kept: Kept, record: JsonObject) -> None:
        # The file holds the whole result until the store does, so that there is no moment without it.
        with suppress(OSError):
            rewrite(outputs_home(_home(self._call.space), self._call.space.user), kept, record)


async def _add(runs: Runs, run: Run, data: bytes | None, receipt: Receipt | None) -> None:
    if data is not None or not runs.add_now(run, receipt):
        await to_thread(runs.add, run, data, receipt)


@lru_cache(maxsize=64)
def _home(space: Space) -> Path:
    return space.project_ai


_ROOM = 1_000
"""How much of a receipt the hosts that a process reached may take, in characters."""
_CODES = {"error": "execution_failed"}
"""The codes of failures that are not the words of their statuses."""


def _sent(outcome: Outcome) -> JsonObject:
    """Return what was sent and received, for a receipt: the sums, and as many hosts as have room."""
    network = as_object(outcome.details.get("network")) or outcome.sent
    hosts = rows = as_list(network.get("hosts"))
    while len(compact(hosts)) > _ROOM:
        hosts = hosts[: len(hosts) // 2]
    left_out = {"left_out": len(rows) - len(hosts)} if len(hosts) < len(rows) else {}
    return {"network": {**network, "hosts": hosts, **left_out}} if network else {}


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


def _unrecorded(reason: KiwiError) -> str:
    return f"The run was not recorded: {reason.message}"
