"""The DBOS engine: each segment of a thread, from waking to the next wait, is a DBOS workflow with one step.

DBOS stores which worker runs which segment, in tables of its own. It decides nothing: a worker gets a thread by its
lease, and what was done is in the journal. So no workflow is ever replayed: one of a lost worker is cancelled, and the
worker that takes the lease over begins another. A worker that was only frozen finds its workflow cancelled, and stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from time import monotonic
from typing import TypeVar

import psycopg
from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer, SetWorkflowID
from sqlalchemy import Engine as Tables
from sqlalchemy import create_engine, event

from kiwi_mcp.domain.errors import LeaseLost, StoreUnavailable
from kiwi_mcp.engine.inline import EngineStep, Live, run_to_wait
from kiwi_mcp.store.open import masked
from kiwi_mcp.store.sqlite import library

PROTOCOL = "kiwi-1"
"""The version of the workflow. It changes when what a worker stores cannot be understood by an older one."""
_KEPT, _CLEANING = timedelta(days=1), 3_600.0
"""For how long the workflows of segments that have ended are kept, and how many seconds pass between deletions."""
_MOST = 1_000
"""How many workflows are read or deleted at once."""
_ENDED = ["SUCCESS", "ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED"]
_FILE = "sqlite://"

S = TypeVar("S", bound=EngineStep)


class DbosEngine:
    """The DBOS of this process: there can be only one."""

    def __init__(self, tables: Tables, owner: str, process: str) -> None:
        self._tables = tables
        # Owners who share a database share the tables, so each is an application of its own.
        self._application = f"kiwi-{sha256(owner.encode()).hexdigest()[:16]}"
        self._process = process
        self._steps: dict[str, Callable[[], Coroutine[object, object, str]]] = {}
        self._numbers = count(1)
        self._cleaned_at = monotonic() - _CLEANING
        self._fault: Exception | None = None

        async def segment() -> str:
            step = self._steps.get(str(DBOS.workflow_id))
            if step is None:  # another worker began it, and only the lease says who continues it
                return "elsewhere"
            return await DBOS.run_step_async({"name": "run_to_wait", "preemptible": True}, step)

        # The thread counts its recoveries itself.
        self._segment = DBOS.workflow(name="segment", max_recovery_attempts=None)(segment)
        config: DBOSConfig = {
            "name": self._application,
            "system_database_engine": tables,
            "dbos_system_schema": "kiwi_dbos",  # other programs may use the default one, with another version of DBOS
            "application_version": PROTOCOL,
            "executor_id": process,
            "serializer": DBOSPortableJSONSerializer(),  # the default would unpickle what it reads
            "use_listen_notify": False,
            "notification_listener_polling_interval_sec": 0.2,  # nothing is sent; it is how long closing takes
            "max_executor_threads": 32,
            "log_level": "CRITICAL",
        }
        DBOS(config=config)

    async def run_to_wait(self, advance: Callable[[], Awaitable[S]], thread_id: str, lease: int) -> S:
        """Advance a thread inside a workflow; raise `LeaseLost` if the workflow was cancelled."""
        context, tasks = copy_context(), list[asyncio.Task[S]]()

        async def step() -> str:
            # Threads that this one starts get workflows of their own, so it runs outside the context of this workflow.
            task = asyncio.create_task(run_to_wait(advance), context=context)
            tasks.append(task)
            try:
                await asyncio.wait(tasks)
            finally:
                task.cancel()
                await asyncio.wait(tasks)
            return "ended"

        name, fault = f"{thread_id}.{lease}.{next(self._numbers)}", None
        self._steps[name] = step
        try:
            with SetWorkflowID(name):
                await self._segment()
        except Exception as error:  # noqa: BLE001 - the result of the task counts, not whether DBOS could store its end
            fault = error
        finally:
            del self._steps[name]
        if not tasks:
            self._fault = fault
            raise _unavailable("it cannot begin a workflow") from fault
        if tasks[0].cancelled():
            raise LeaseLost(thread_id) from fault
        return tasks[0].result()

    async def sweep(self, live: Live) -> None:
        """Cancel the workflows of lost workers, and those that end only in the journal; delete old ones.

        Raise an error if DBOS does not work: then the worker ends, and does not take the same threads again and again.
        """
        if self._fault is not None:
            raise _unavailable("it cannot begin a workflow") from self._fault
        listed = partial(
            DBOS.list_workflows_async,
            application_name=self._application,
            load_input=False,
            load_output=False,
            limit=_MOST,
        )
        try:
            pending = await listed(status="PENDING")
            others = {*await live()} - {self._process}
            open_ = [one.workflow_id for one in pending if one.executor_id in others]
            if lost := {one.workflow_id for one in pending}.difference(open_, self._steps):
                await DBOS.cancel_workflows_async([*lost])
            if monotonic() - self._cleaned_at >= _CLEANING:
                old = await listed(status=_ENDED, completed_before=(datetime.now(UTC) - _KEPT).isoformat())
                if old:
                    await DBOS.delete_workflows_async([one.workflow_id for one in old])
                if len(old) < _MOST:
                    self._cleaned_at = monotonic()
        except Exception as error:
            raise _unavailable("its tables cannot be read or written") from error

    async def aclose(self) -> None:
        """End the threads of DBOS, and close its tables."""
        # DBOS gave the loop its own thread pool, which ends with it.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(thread_name_prefix="kiwi"))
        await asyncio.to_thread(DBOS.destroy, destroy_registry=True)
        self._tables.dispose()


def open_engine(url: str, owner: str, process: str) -> DbosEngine:
    """Start DBOS beside a store: in the same PostgreSQL, or in a file beside that of SQLite."""
    try:
        if url.startswith(_FILE):
            tables = _sqlite(url)
        else:
            connect = partial(psycopg.connect, url, application_name="kiwi-dbos", connect_timeout=10)
            pool = {"pool_size": 4, "max_overflow": 16}
            tables = create_engine("postgresql+psycopg://", creator=connect, pool_pre_ping=True, **pool)
        engine = DbosEngine(tables, owner, process)
        DBOS.launch()
    except Exception as error:  # it lets the errors of the driver pass
        DBOS.destroy(destroy_registry=True)
        raise _unavailable(f"its tables beside {masked(url)} cannot be made or read") from error
    return engine


def _unavailable(reason: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"The DBOS engine does not work: {reason}.",
        suggestion="Check that the user of the store may make tables there, or start the worker without `--engine`.",
    )


def _sqlite(url: str) -> Tables:
    path = Path(url.removeprefix(_FILE)).with_name("engine.db")
    path.touch(mode=0o600)
    tables = create_engine(f"sqlite:///{path}", module=library)

    @event.listens_for(tables, "connect")
    def prepare(connection: library.Connection, _: object) -> None:
        connection.isolation_level = "IMMEDIATE"  # a transaction that begins as a reader could not become a writer
        for setting in ("busy_timeout = 30000", "journal_mode = wal", "synchronous = normal", "foreign_keys = on"):
            connection.execute(f"pragma {setting}")

    return tables
