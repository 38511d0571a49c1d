"""The thread driver: to execute a thread item is to start it and to wait until it ends or waits."""

from __future__ import annotations

from collections.abc import Mapping

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import ThreadWaiting
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.drivers import Dispatch
from kiwi_mcp.drivers.native import Native


class ThreadItem(Native):
    """Starts a thread item; its calls pass every gate of their own."""

    driver = "thread"
    verb = "thread"

    def request(self, plan: Plan, space: Space) -> JsonObject:
        """Return the request that starts the thread."""
        return {"action": "start", "item_id": plan.identity, "inputs": plan.inputs, "wait": True}

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: Dispatch
    ) -> Outcome:
        """Start the thread, and return its result with what it used."""
        request = self.request(plan, space)
        if space.project_ai.is_dir():
            request = {**request, "project_path": str(space.project)}
        answer = as_object(await dispatch(self.verb, request))
        details = {name: answer[name] for name in ("thread_id", "usage", "finish_reason") if name in answer}
        if answer.get("status") == "waiting":
            approvals = as_list(answer.get("approvals"))
            question = next(map(as_object, as_list(answer.get("questions"))), {})
            first = as_text(question.get("message")).partition("\n")[0][:200].removesuffix(" Its program:")
            asked = f": {first}" if first else "."
            raise ThreadWaiting(
                f"The thread {answer.get('thread_id')} waits for {answer.get('waits_for')}{asked}",
                waits_for=as_text(answer.get("waits_for")),
                question_id=as_text(question.get("question_id")),
                approvals=[as_text(one) for one in approvals],
                thread_id=as_text(answer.get("thread_id")),
            )
        if answer.get("status") == "completed":
            return Outcome("success", result=answer.get("result"), details=details)
        return Outcome(
            "error",
            result=answer.get("result"),
            message=as_text(answer.get("message")) or f"The thread ended: {answer.get('status')}.",
            suggestion=f"Look at it with `kiwi thread show {answer.get('thread_id')}`.",
            details=details,
        )


create_driver = ThreadItem
