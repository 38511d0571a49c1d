"""The ledger: every call that runs, changes or searches is in it, refused ones too, and only then is it answered."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kiwi_mcp.domain.errors import Internal, InvalidManifest, KiwiError
from kiwi_mcp.domain.json import JsonObject, as_list
from kiwi_mcp.domain.receipt import Receipt
from kiwi_mcp.domain.run import RunStatus
from kiwi_mcp.kernel.anchor import Anchor
from kiwi_mcp.kernel.answers import Answer
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.witness import Witness, recorded


class Ledger:
    """The receipts of one kernel's calls, as they are written."""

    def __init__(self, user: Path, store: Store, surface: str) -> None:
        self.anchor = Anchor(user, store)
        self._store = store
        self._surface = surface

    def witness(self, verb: str, payload: JsonObject) -> Witness | None:
        """Return whoever sees a call through; None where it is not written down."""
        action = recorded(verb, payload)
        return Witness(action, payload, self._surface, self._store.audit_level) if action else None

    async def demand(self, witness: Witness | None) -> None:
        """Refuse a call that must leave a receipt where none can be written, before it changes anything."""
        if witness is not None and witness.is_of_trust:
            await asyncio.to_thread(self._store.receipts)

    async def enter(self, witness: Witness, answer: Answer, actor: str) -> Answer:
        """Write a call down that left no run, and return its answer, which tells if that could not be done."""
        if witness.is_heard:
            self.anchor.note()
        if witness.is_heard or answer.content.get("status") == "planned":
            return answer
        try:
            await self._write(witness, _status(answer), answer.content, actor)
        except KiwiError as reason:
            known = as_list(answer.content.get("warnings"))
            told = _missing(witness, answer, reason)
            warnings = known if told in known else [*known, told]
            return replace(answer, content={**answer.content, "warnings": warnings})
        return answer

    async def enter_cancelled(self, witness: Witness, actor: str) -> None:
        """Write a call down that was cancelled before it left a run."""
        # A task that was cancelled may be so again while it waits; the thread writes the receipt all the same.
        if not witness.is_heard:
            with suppress(KiwiError, asyncio.CancelledError):
                await self._write(witness, "cancelled", {"code": "cancelled"}, actor)

    async def _write(self, witness: Witness, status: RunStatus, answer: JsonObject, actor: str) -> None:
        receipt = witness.of_answer(actor or self._store.actor.name, status, answer)
        # Whoever looks for something gets the answer sooner without a way to another thread and back.
        if not (witness.is_of_look and self._is_added_now(receipt)):
            await asyncio.to_thread(self._add, receipt, is_of_look=witness.is_of_look)
        self.anchor.note()

    def _is_added_now(self, receipt: Receipt) -> bool:
        """Write a receipt where nothing has to be waited for, and say whether that was done."""
        receipts = self._store.receipts_if_open()
        return receipts is not None and receipts.add_now(receipt)

    def _add(self, receipt: Receipt, *, is_of_look: bool) -> None:
        receipts = self._store.receipts()
        if not (is_of_look and receipts.add_now(receipt)):
            receipts.add(receipt)

    async def aclose(self) -> None:
        """Keep the place of what was written."""
        await self.anchor.aclose()


def _missing(witness: Witness, answer: Answer, reason: KiwiError) -> str:
    """Return what is told where no receipt could be written."""
    if witness.is_of_look and isinstance(reason, InvalidManifest):  # the settings: whoever looks may need to know
        return f"{reason.message} {reason.suggestion}"
    told = "No receipt was written" if answer.is_error else "It was done, and no receipt of it was written"
    return f"{told}: {reason.message}"


def _status(answer: Answer) -> RunStatus:
    if not answer.is_error:
        return "success"
    return "error" if answer.content.get("code") == Internal.code else "refused"
