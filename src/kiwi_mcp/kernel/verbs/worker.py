"""worker: run the threads that wait in the queue, and serve schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.threads.worker import Worker, WorkerOptions
from kiwi_mcp.kernel.verb import OWNER, NameText, Option, Request, Response, verb
from kiwi_mcp.kernel.view import Data, ViewItem


class WorkerRequest(Request, frozen=True, kw_only=True):
    """What a worker serves, and when it ends."""

    queues: Annotated[list[NameText] | None, Option("Only these queues, with commas.", kind="commas")] = None
    concurrency: Annotated[int, Meta(ge=1, le=1_000), Option("Run at most this many threads at once.")] = 8
    engine: Annotated[
        Literal["inline", "dbos"],
        Option("Run segments of threads inline, or as workflows of DBOS."),
    ] = "inline"
    until_idle: Annotated[bool, Option("End when no thread can continue.")] = False
    while_pending: Annotated[
        bool, Option("End when nothing is due, now or later. Kiwi starts such a worker by itself, one for each home.")
    ] = False


class WorkerResponse(Response, frozen=True, kw_only=True):
    """How many threads were run."""

    threads: int


def _view(response: WorkerResponse) -> Iterator[ViewItem]:
    yield Data(f"Threads that this worker ran: {response.threads}")


@verb("worker", access=OWNER, wire=("worker",), records=False, is_local=True, shows=_view)
async def worker(request: WorkerRequest, context: VerbContext) -> WorkerResponse:
    """Run the threads in the queue and serve schedules, until it is stopped."""
    options = WorkerOptions(
        tuple(request.queues or ()),
        request.concurrency,
        is_until_idle=request.until_idle,
        is_on_demand=request.while_pending,
        engine=request.engine,
    )
    return WorkerResponse(threads=await Worker(context.services, options).run())
