"""A thread's request to its model: reserved in the budget, judged as a plan, sent, settled and written down."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import to_builtins

from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.domain.errors import KiwiError, RequestFailed
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.messages import ModelReply, Prompt
from kiwi_mcp.domain.threads import NewEvent, ThreadChanges, ThreadUsage
from kiwi_mcp.drivers.llm.model import bind_request, complete
from kiwi_mcp.drivers.llm.prices import cost_micros, worst_case_micros
from kiwi_mcp.drivers.llm.provider import ModelChoice
from kiwi_mcp.kernel.pipeline import permit_model_request
from kiwi_mcp.kernel.recorder import CallRecord
from kiwi_mcp.kernel.threads.work import ThreadWork
from kiwi_mcp.store.budget import Refusal, Reservation, settle
from kiwi_mcp.store.database import Transaction
from kiwi_mcp.store.receipts import append

_LEAST_OUTPUT = 16
"""A reply shorter than this many tokens is of no use."""


class ModelRefused(Exception):
    """A request to the model that the budget does not allow; `limit` is empty where the owner is asked."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


async def ask_model(work: ThreadWork) -> None:
    """Make one request to the model and append its reply."""
    choice = work.choice
    prompt, reservation = await _reserve(work, choice)
    plan = bind_request(prompt, choice, work.provider)
    context = work.services.context(NO_CALLER, work.catalog)
    try:
        plan, secrets = permit_model_request(plan, work.provider, context)
        async with asyncio.timeout(max(1.0, work.thread.limits.seconds - work.seconds())):
            reply = await complete(plan, choice, secrets, work.observe)
    except TimeoutError as slow:
        await work.close_reservation(reservation, is_used=True)
        raise ModelRefused("duration") from slow
    except KiwiError as error:
        # A request that was never answered costs nothing; a reply that was lost may have cost all of it.
        await work.close_reservation(reservation, is_used=isinstance(error, RequestFailed))
        raise
    except asyncio.CancelledError:
        await asyncio.shield(work.close_reservation(reservation, is_used=True))
        raise
    await _append(work, choice, reply, reservation)


async def _append(work: ThreadWork, choice: ModelChoice, reply: ModelReply, reservation: Reservation) -> None:
    """Append a reply with what it cost, and the receipt of the request, in one transaction."""
    cost = cost_micros(reply.usage, choice)
    body: JsonObject = {
        "parts": to_builtins(reply.parts),
        "stop": reply.stop,
        "usage": to_builtins(reply.usage),
        "cost_micros": cost,
        "model": reply.model,
    }
    record = CallRecord(
        "model",
        {"parameters": {"thread": work.thread.id, "provider": choice.provider, "model": choice.model}},
        work.services.surface,
        work.services.store.audit_level,
        needs_receipt=False,
    )
    receipt = record.of_answer(
        work.starter.name or work.services.store.actor.name, "success", {"identity": work.provider.tool.identity}
    )

    used = ThreadUsage(
        input_tokens=reply.usage.input,
        cache_read_tokens=reply.usage.cache_read,
        cache_write_tokens=reply.usage.cache_write,
        output_tokens=reply.usage.output,
        is_estimated=reply.usage.is_estimated,
    )

    def also(transaction: Transaction) -> None:
        settle(transaction, reservation, cost or 0, used, model=reply.model)
        append(transaction, msgspec.structs.replace(receipt, cost_micros=cost or 0))

    await work.append(NewEvent("model", body), changes=ThreadChanges(turns=1), also=also)


async def _reserve(work: ThreadWork, choice: ModelChoice) -> tuple[Prompt, Reservation]:
    """Return the next prompt, with the worst case of its cost reserved; its output is shortened to what fits."""
    size = work.input_bound()
    output = min(choice.max_output, work.max_output)
    while True:
        worst = worst_case_micros(size, output, choice)
        if worst is None and not await work.is_confirmed("price"):
            raise ModelRefused("")
        found = await work.reserve(worst or 0, size + output)
        if isinstance(found, Reservation):
            return work.prompt(output), found
        output = min(output - 1, _fitting_output(found, size, output, choice))
        if output < _LEAST_OUTPUT:
            raise ModelRefused(found.limit)


def _fitting_output(refusal: Refusal, size: int, output: int, choice: ModelChoice) -> int:
    """Return how many tokens of output the rest of a budget pays for."""
    if refusal.limit == "tokens":
        return min(output, refusal.rest - size)
    base, full = worst_case_micros(size, 0, choice) or 0, worst_case_micros(size, output, choice) or 0
    return output * max(0, refusal.rest - base) // max(1, full - base)
