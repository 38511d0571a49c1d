"""The Python API: the names that `kiwi_mcp` exports, and `Kernel.run`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import kiwi_mcp
from kiwi_mcp import Invalid, Kernel, NotFound, ToolFailed

TOOL = """\
# tool_type: script
# executor: bash_runtime
# version: 1.0.0
# description: Repeat a text
# parameters:
#   - {name: text, type: string, required: true}
#   - {name: times, type: integer, default: 1}
[ "$KIWI_PARAM_text" != no ] || { echo "will not say that" >&2; exit 3; }
for ((i = 0; i < KIWI_PARAM_times; i++)); do printf '%s' "$KIWI_PARAM_text"; done
"""


@pytest.fixture
async def kernel(project: Path, home: Path, sandbox: None) -> AsyncIterator[Kernel]:
    (project / ".ai" / "tools").mkdir(parents=True)
    (project / ".ai" / "tools" / "repeat.sh").write_text(TOOL)
    kernel = Kernel(project)
    await kernel.call("execute", {"action": "sign", "item_id": "repeat"})
    yield kernel
    await kernel.aclose()


def test_the_public_names_are_these() -> None:
    assert sorted(kiwi_mcp.__all__) == [
        "Answer", "Caller", "Conflict", "Denied", "Internal", "Invalid", "Kernel", "KiwiError", "NotFound",
        "ReplyDelta", "ThreadEvent", "ToolFailed", "Unavailable", "Untrusted", "__version__",
    ]  # fmt: skip
    assert all(getattr(kiwi_mcp, name) for name in kiwi_mcp.__all__)
    with pytest.raises(AttributeError):
        kiwi_mcp.lost  # noqa: B018 - reading it is the test


def test_the_parameters_of_a_thread_are_these() -> None:
    assert [*inspect.signature(Kernel.thread).parameters] == ["self", "item", "inputs", "limits", "model", "caller"]
    assert [*inspect.signature(Kernel.thread_events).parameters] == ["self", "request", "caller"]


@pytest.mark.usefixtures("processes")
def test_importing_the_package_loads_nothing_else() -> None:
    program = "import sys, kiwi_mcp; print([name for name in sys.modules if name.startswith('kiwi_mcp.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


async def test_run_returns_the_result_of_a_tool(kernel: Kernel) -> None:
    assert await kernel.run("repeat", text="kiwi") == "kiwi"


async def test_run_returns_a_large_result_whole(kernel: Kernel) -> None:
    assert await kernel.run("repeat", text="0123456789", times=20_000) == "0123456789" * 20_000


async def test_run_raises_what_a_failed_tool_answered(kernel: Kernel) -> None:
    with pytest.raises(ToolFailed) as failed:
        await kernel.run("repeat", text="no")
    assert failed.value.answer["exit_code"] == 3
    assert failed.value.details == {"tool_id": "repeat"}


async def test_run_raises_the_error_of_a_refused_call(kernel: Kernel) -> None:
    with pytest.raises(NotFound):
        await kernel.run("lost")
    with pytest.raises(Invalid):
        await kernel.run("repeat", txt="kiwi")
