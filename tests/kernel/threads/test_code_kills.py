"""Processes of code mode programs are killed at any moment."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.kernel.threads.conftest import Agents
from tests.kernel.threads.test_kills import EFFECTS, SCRIPT, SEED, Siege, no_other_worker, use_store

from kiwi_mcp.domain.times import now_ms

pytestmark = pytest.mark.usefixtures("sandbox", no_other_worker.__name__)
PROGRAM = """
import asyncio
done = []
for turn in range(3):
    done.append(await tools.do_pure(turn=turn))
    await tools.do_at_most_once(turn=turn)
    await asyncio.gather(*[tools.do_idempotent(turn=turn, n=n) for n in range(2)])
print("end")
len(done)
"""


class ProgramSiege(Siege):
    """A home in which processes are killed while they run programs."""

    async def kill_often(self, kills: int) -> None:
        """Start processes that run programs, one after the other, and kill each after a random time."""
        while self.killed.total() < kills:
            is_new = not self.under_way()
            self.started += is_new
            start = ["run", "code", f"code={PROGRAM}"]
            await asyncio.to_thread(self.kill_later, start if is_new else ["worker", "--until-idle"])
            await self.answer_all()

    async def answer_all(self) -> None:
        """Say of every call with an unknown end that it was done: a program fails at one that was not."""
        for question in self.runner.stores.questions.open(now_ms()):
            await self.agents.call("thread", action="answer", question_id=question.id, answer="done")

    def kill_later(self, words: list[str]) -> None:
        """Run one command, and kill it after a random number of seconds."""
        process = self.popen(*words)
        self.wait_for_requests(10_000, process, self.chance.uniform(0.3, 3.0))
        if process.poll() is None:
            process.kill()
            self.killed[words[0]] += 1
        process.wait()

    async def check_programs(self) -> None:
        """Check that every program ended with its value, and that no finished call ran again."""
        for thread in self.threads():
            assert thread.is_ended
            assert self.runner.stores.threads.verify(thread.id) == (), thread
            if thread.code != "recovery_limit":
                assert thread.result == {"value": 3, "printed": "end\n"}, thread
        lines = self.lines("at_most_once")
        assert len(lines) == len({*lines}), lines
        assert (await self.agents.read("audit", action="verify"))["status"] == "verified"


@pytest.fixture
async def siege(request: pytest.FixtureRequest, agents: Agents) -> ProgramSiege:
    use_store(request, agents)
    for effect in EFFECTS:
        script = SCRIPT.format(effect=effect)
        agents.bash_tool(f"do_{effect}", script, effect=effect, needs={"write": ["."]})
        await agents.call("approvals", action="add_rule", item=f"*/do_{effect}@*")
    await agents.sign(*(f"do_{effect}" for effect in EFFECTS))
    return ProgramSiege(agents, random.Random(SEED))


@pytest.mark.timeout(120)
async def test_a_program_survives_kills(siege: ProgramSiege) -> None:
    await siege.kill_often(3)
    await siege.finish()
    await siege.check_programs()


@pytest.mark.soak
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("siege", ["sqlite", "postgres"], indirect=True)
@pytest.mark.req("K-CO-05")
async def test_fifty_kills_repeat_no_finished_call_of_a_program(siege: ProgramSiege) -> None:
    await siege.kill_often(50)
    await siege.finish()
    siege.write_journals()
    await siege.check_programs()
