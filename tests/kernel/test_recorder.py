"""The recorder: runs that end together share a transaction, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import StoreUnavailable
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.drivers.process import Process
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.store.runs import EndedRun, Runs

CALLS = 12
TOOL = "# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\n# description: Say\necho hi\n"


class Waiting(Process):
    """A driver of which all calls end in one turn of the event loop."""

    def __init__(self) -> None:
        self.begun = 0
        self.all_begun = asyncio.Event()

    async def prepare(self, plan: Plan, chain: Chain, space: Space) -> None:
        """Check nothing."""

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: object
    ) -> Outcome:
        self.begun += 1
        if self.begun == CALLS:
            self.all_begun.set()
        await self.all_begun.wait()
        return Outcome("success", result="done")


@pytest.fixture
async def kernel(project: Path, home: Path) -> Kernel:
    (project / ".ai" / "tools").mkdir()
    (project / ".ai" / "tools" / "say.sh").write_text(TOOL)
    kernel = Kernel(project)
    kernel._services.drivers._loaded["process"] = Waiting()
    return kernel


async def call(kernel: Kernel) -> JsonObject:
    return (await kernel.call("execute", {"item_id": "say"})).content


async def recorded(kernel: Kernel) -> tuple[int, int]:
    """Return how many runs and receipts of runs are stored."""
    runs = as_list((await kernel.call("runs", {"action": "list", "limit": 100})).content["runs"])
    receipts = as_list((await kernel.call("audit", {"action": "list", "limit": 100})).content["receipts"])
    return len(runs), len([one for one in receipts if as_object(one)["action"] == "run"])


async def test_calls_that_end_together_share_a_commit(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    record_now = Runs.record_now

    def counted(self: Runs, ended: list[EndedRun]) -> bool:
        batches.append(len(ended))
        return record_now(self, ended)

    monkeypatch.setattr(Runs, "record_now", counted)
    responses = await asyncio.gather(*(call(kernel) for _ in range(CALLS)))
    assert {one["status"] for one in responses} == {"success"}
    assert sum(batches) == CALLS
    assert len(batches) < CALLS
    assert await recorded(kernel) == (CALLS, CALLS)
    await kernel._services.recorder.aclose()  # the end of the chain is saved
    verified = (await kernel.call("audit", {"action": "verify"})).content
    assert not verified.get("issues"), verified


async def test_what_cannot_be_written_together_is_written_by_itself(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Runs, ended: list[EndedRun]) -> bool:
        if len(ended) > 1:
            raise StoreUnavailable("One of them is refused.", suggestion="Write each by itself.")
        return False

    monkeypatch.setattr(Runs, "record_now", refused)
    responses = await asyncio.gather(*(call(kernel) for _ in range(CALLS)))
    assert not any(one.get("warnings") for one in responses)
    assert await recorded(kernel) == (CALLS, CALLS)


async def test_a_call_that_is_cancelled_while_its_run_is_written_keeps_its_receipt(kernel: Kernel) -> None:
    driver = kernel._services.drivers._loaded["process"]
    assert isinstance(driver, Waiting)
    tasks = [asyncio.create_task(call(kernel)) for _ in range(CALLS)]
    await driver.all_begun.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await recorded(kernel) == (CALLS, CALLS)


async def test_a_fault_of_ours_in_the_shared_transaction_leaves_no_call_waiting(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Runs, ended: list[EndedRun]) -> bool:
        raise ValueError(ended)

    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault["exception"]))
    monkeypatch.setattr(Runs, "record_now", fail)
    async with asyncio.timeout(120):
        answers = await asyncio.gather(*(call(kernel) for _ in range(CALLS)))
    assert {answer["status"] for answer in answers} == {"success"}
    assert len(faults) == 1
    monkeypatch.undo()
    assert await recorded(kernel) == (CALLS, CALLS)
    await kernel.aclose()
