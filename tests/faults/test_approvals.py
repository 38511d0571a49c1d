"""Processes killed at any moment: a question still waits, and no approval is created or used twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kiwi_mcp
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.store import Store

ROUNDS = 8
PATIENCE = 120.0
CALLING = """
import asyncio, sys
from pathlib import Path
from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.kernel import Kernel

async def never(questions):
    print("asked", flush=True)
    await asyncio.Event().wait()

async def main(project, how):
    kernel = Kernel(Path(project))
    await kernel.call("search", {"query": "note"})
    print("ready", flush=True)
    sys.stdin.readline()
    caller = Caller(ask=never, is_owner=True) if how == "asking" else Caller()
    answer = await kernel.call("execute", {"item_id": "post_note", "parameters": {"text": "hi"}}, caller)
    print(answer.content.get("code", answer.content["status"]), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def calling(project: Path, how: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that makes one call on request, and is killed at the end of the block at the latest."""
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}
    words = [sys.executable, "-c", CALLING, str(project), how]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert heard(process) == "ready"
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def tell(project: Path) -> Callable[..., JsonObject]:
    """Ask a kernel that was just started."""

    def call(verb: str, **request: object) -> JsonObject:
        async def asked() -> JsonObject:
            kernel = Kernel(project)
            try:
                async with asyncio.timeout(PATIENCE):
                    return (await kernel.call(verb, request)).content  # type: ignore[arg-type]  # JSON as it stands here
            finally:
                await kernel.aclose()

        return asyncio.run(asked())

    return call


def call(tell: Callable[..., JsonObject]) -> JsonObject:
    return tell("execute", item_id="post_note", parameters={"text": "hi"})


@pytest.mark.usefixtures("processes")
@pytest.mark.case("APPR-09")
def test_a_question_outlives_the_process_that_asked_it(
    project: Path, home: Path, sent: list[str], tell: Callable[..., JsonObject]
) -> None:
    with calling(project, "asking") as process:
        go(process)
        assert heard(process) == "asked"
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    (kept,) = Store(home / ".ai").approvals().list(0)
    assert kept.status == "pending"
    waiting = call(tell)
    assert (waiting["code"], waiting["approval_id"]) == ("approval_required", kept.id)
    assert sent == []
    tell("approvals", action="approve", approval_id=kept.id)
    assert call(tell)["status"] == "success"
    assert sent == ['{"text":"hi"}']


@pytest.mark.usefixtures("processes")
def test_an_approval_is_used_once_wherever_its_process_is_killed(
    project: Path, home: Path, sent: list[str], tell: Callable[..., JsonObject]
) -> None:
    chance = random.Random(8)
    approvals = Store(home / ".ai").approvals()
    for number in range(ROUNDS):
        before = len(sent)
        # What was used up in the round before is asked about anew.
        approval = as_text(call(tell)["approval_id"])
        tell("approvals", action="approve", approval_id=approval)
        with calling(project) as process:
            go(process)
            time.sleep(chance.uniform(0, 0.12))  # somewhere between the gate and the record
        status = approvals.get(approval, 0).status
        assert status in {"approved", "used"}, number
        again = call(tell)
        # Either it was never used, and is now; or it is spent, whatever became of the run.
        assert again.get("code") == ("approval_required" if status == "used" else None)
        assert len(sent) - before <= 1
    assert tell("audit", action="verify")["status"] == "verified"
