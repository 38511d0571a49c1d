"""What holding a process costs: a launch through each backend, a whole call at each level, and the rights before it."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from bookkeeping import Spread
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.grants import Allow, Grant, Rights, Rules, narrow
from kiwi_mcp.domain.isolation import Level, SandboxProfile
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.drivers.sandboxed import Sandbox, open_sandbox
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.policy.authorize import authorize
from measure import Case, Measured, interleaved
from tools import BASH, create, relax, run

_ENV = {"PATH": "/usr/bin:/bin", "KIWI_PARAM_text": "hello"}
_LEVELS: tuple[Level, ...] = ("trusted", "standard", "sandboxed", "restricted")
_DECISIONS = 2_000
_DEPTH = 3
"""How many grants have a say in the decision that is measured: the owner's, a directive's and a thread's."""


def measure(turns: int) -> tuple[list[Measured], list[Measured]]:
    """Return what a launch and what a whole call costs at each level that this machine gives, each after bash alone."""
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, closing(loop):
        folder = Path(name)
        folder.chmod(0o755)  # what is granted must be reached by the user that a sandbox of root's becomes
        script = folder / "main.sh"
        script.write_text(BASH, encoding="utf-8")
        alone = Case("bash main.sh", partial(_spawn, script))
        launches = [Case(f"launch, {level}", turn) for level, turn in _launches(loop, folder, script).items()]
        kernel = Kernel(folder, user=folder / "user", cache=folder / "cache")
        calls = [Case(f"bash tool, {level}", turn) for level, turn in _calls(loop, kernel, len(launches)).items()]
        try:
            both = [interleaved([alone, *cases], turns=turns, warm=5) for cases in (launches, calls)]
        finally:
            loop.run_until_complete(kernel.aclose())
    return both[0], both[1]


def measure_rights() -> list[Spread]:
    """Return what one decision takes that was never made before, and one that was."""
    rights = Rights()
    for number in range(1, _DEPTH):
        allowed = Grant(items=Rules(("tool_*", "core/*")), commands=Rules(("bash",)), name=f"grant {number}")
        rights = narrow(rights, allowed)
    plans = [_plan(number) for number in range(_DECISIONS)]
    cases = {"a new plan": plans, "the same plan again": plans[:1] * _DECISIONS}
    spreads: list[Spread] = []
    for name, these in cases.items():
        took = sorted(_decided(plan, rights) for plan in these)
        spreads.append(Spread(name, took[0], statistics.median(took)))
    return spreads


def _decided(plan: Plan, rights: Rights) -> float:
    started = time.perf_counter_ns()
    if not isinstance(authorize(plan, rights), Allow):
        raise RuntimeError("the plan is allowed")  # noqa: TRY004 - what is wrong is the answer, not a type
    return (time.perf_counter_ns() - started) / 1_000


def _plan(number: int) -> Plan:
    identity, spec = f"tool_{number}@1.0.0", ProcessSpec(("/usr/bin/bash", "main.sh"), cwd="/", env=_ENV, timeout=20.0)
    chain = ((identity, ""), ("core/bash_runtime@1.0.0", ""), ("core/subprocess@1.0.0", ""))
    return Plan(identity, "", "process", chain, spec, {})


def _launches(loop: asyncio.AbstractEventLoop, folder: Path, script: Path) -> dict[Level, Callable[[], None]]:
    """Return a turn for each level that this machine gives; the first one has the self-tests run."""
    spec = ProcessSpec(("bash", str(script)), cwd=str(folder), env=_ENV, timeout=20.0)
    found: dict[Level, Callable[[], None]] = {}
    for level in _LEVELS:
        try:
            hold = loop.run_until_complete(
                open_sandbox(SandboxProfile(level, readable=(str(script),)), Space(folder, folder, folder))
            )
        except IsolationUnavailable:
            continue
        found[level] = partial(_held, loop, hold, spec)
    return found


def _calls(loop: asyncio.AbstractEventLoop, kernel: Kernel, count: int) -> dict[Level, Callable[[], None]]:
    """Return a turn for each of so many levels, all of them through one kernel."""
    found: dict[Level, Callable[[], None]] = {}
    for level in _LEVELS[:count]:
        tool_id = f"bash_{level}"
        create(loop, kernel, tool_id, "bash_runtime", "main.sh", BASH, isolation=level)
        if level in ("trusted", "standard"):
            relax(loop, kernel, tool_id, level)
        found[level] = run(loop, kernel, tool_id)
    return found


def _held(loop: asyncio.AbstractEventLoop, hold: Sandbox, spec: ProcessSpec) -> None:
    ended = loop.run_until_complete(hold.run(spec, secrets={}, report=silent))
    if ended.stdout != b"hello":
        raise RuntimeError(ended.stderr)


def _spawn(script: Path) -> None:
    subprocess.run(
        ["bash", str(script)], env=_ENV, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60
    )
