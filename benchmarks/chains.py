"""How long a call takes to become a permitted plan: resolve, verify, bind, authorize, among 10 and 10,000 tools."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import NO_CALLER, Call, Space
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.context import Context, Services
from kiwi_mcp.kernel.mcp_servers import check_server
from kiwi_mcp.kernel.pipeline import plan_call
from kiwi_mcp.policy.policy_files import OwnerAuthority
from measure import Case, Measured, interleaved

_CALLS = 200
TOOL = """\
tool_id: tool_{number}
tool_type: script
version: "1.0.0"
executor: bash_runtime
description: Tool number {number}
config:
  entrypoint: main.sh
parameters:
  - name: text
    type: string
    required: true
"""


def lay_out(folder: Path, count: int) -> Call:
    """Write a project with so many tools, and return a call of one of them."""
    tools = folder / "project" / ".ai" / "tools"
    for number in range(count):
        place = tools / f"group_{number % 20}" / f"tool_{number}"
        place.mkdir(parents=True)
        (place / "tool.yaml").write_text(TOOL.format(number=number), encoding="utf-8")
        (place / "main.sh").write_text('echo "$KIWI_PARAM_text"\n', encoding="utf-8")
    space = Space(project=folder / "project", user=folder / "user", cache=folder / "cache")
    return Call(f"tool_{count // 2}", space, {"text": "hello"})


def measure(turns: int) -> tuple[list[Measured], float]:
    """Return milliseconds per call for both sizes, and the first answer of a new process among 10,000."""
    with tempfile.TemporaryDirectory() as folder:
        calls = {count: lay_out(Path(folder) / str(count), count) for count in (10, 10_000)}
        cases = [Case(f"{count:,} tools", _calls(call, _context(call))) for count, call in calls.items()]
        for case in cases:
            case.turn()
        time.sleep(0.1)  # files as young as this are read again at each call, as they may still change
        started = time.perf_counter()
        plan_call(calls[10_000], _context(calls[10_000]))
        second_process = (time.perf_counter() - started) * 1_000
        rows = interleaved(cases, turns=turns, warm=2)
    return [Measured(row.name, row.wall_ms / _CALLS, row.cpu_ms / _CALLS, row.ratio) for row in rows], second_process


def _context(call: Call) -> Context:
    space = call.space
    services = Services(
        space.project,
        space.user,
        space.cache,
        OwnerAuthority(space.user),
        is_owner=True,
        surface="cli",
        check_server=check_server,
        dispatch=Kernel(space.project, user=space.user, cache=space.cache).call,
    )
    return Context(services, NO_CALLER, Catalog(space), Rights(), is_owner=True)


def _calls(call: Call, context: Context) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(_CALLS):
            plan_call(call, context)

    return turn
