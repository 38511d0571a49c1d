"""What the kernel loads before it is asked for anything, and what one command loads: its caller waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from kiwi_mcp.surfaces import start

_SELDOM = (
    "cryptography",
    "keyring",
    "kiwi_mcp.drivers.sandboxed",
    "kiwi_mcp.drivers.process",
    "kiwi_mcp.kernel.verbs.doctor",
    "kiwi_mcp.kernel.verbs.search",
    "kiwi_mcp.kernel.verbs.why",
    "kiwi_mcp.primitives.egress_proxy",
    "kiwi_mcp.sandbox.bubblewrap",
    "kiwi_mcp.search.indexes",
    "kiwi_mcp.search.recall",
    "numpy",
    "onnxruntime",
    "rich.status",
)
"""What only some calls need, and what takes long to load."""
_NOT_FOR_A_RUN = (
    "anyio",
    "cryptography",
    "httpcore2",
    "httpx2",
    "jsonpath",
    "keyring",
    "kiwi_mcp.drivers.http",
    "kiwi_mcp.drivers.mcp",
    "kiwi_mcp.kernel.verbs.doctor",
    "http",
    "kiwi_mcp.search.index",
    "kiwi_mcp.surfaces.gateway",
    "kiwi_mcp.surfaces.mcp",
    "mcp",
    "mcp_types",
    "numpy",
    "onnxruntime",
    "opentelemetry",
    "psycopg",
    "rich",
    "starlette",
    "urllib.request",
    "uvicorn",
    "websockets",
    "xml.sax",
)
"""What `kiwi run` of a bash tool does not load: together these take several times as long as the command."""


def _loaded(program: str, names: Sequence[str] = _SELDOM, folder: Path | None = None) -> list[str]:
    missing = [name for name in names if find_spec(name) is None]
    assert missing == []  # a name that nothing has is never loaded
    response = f"import sys\n{program}\nprint(*[name for name in {names!r} if name in sys.modules], file=sys.stderr)"
    words = [sys.executable, "-c", response]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1].split()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("module", ["kiwi_mcp.kernel", "kiwi_mcp.surfaces.cli.actions"])
def test_nothing_for_processes_or_keys_is_loaded_before_it_is_used(module: str) -> None:
    assert _loaded(f"import {module}") == []


_RUN = """
sys.argv = ["kiwi", "run", "hello"]
from kiwi_mcp.surfaces.start import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def _write_tool(project: Path) -> None:
    words = ("tool_id: hello", "tool_type: script", "executor: bash_runtime", "version: 1.0.0", "description: Say hi")
    tool = project / ".ai" / "tools" / "hello.sh"
    tool.parent.mkdir(parents=True)
    tool.write_text("\n".join(("#!/bin/bash", "# ---", *(f"# {word}" for word in words), "# ---", "echo hi", "")))


@pytest.mark.usefixtures("sandbox")
def test_running_a_bash_tool_loads_no_library_that_it_does_not_need(project: Path) -> None:
    _write_tool(project)

    assert _loaded(_RUN, _NOT_FOR_A_RUN, project) == []


_DEFERRED = f"""
from kiwi_mcp.surfaces import start
start.defer_modules()
deferred = [name for name, module in sys.modules.items() if isinstance(module, start.LateModule)]
assert len(deferred) > 20, deferred
{_RUN}
used = [name for name in deferred if not isinstance(sys.modules[name], start.LateModule)]
assert not used, used
for name in deferred:
    getattr(sys.modules[name], "no_such_name", None)
    assert not isinstance(sys.modules[name], start.LateModule), name
"""


@pytest.mark.usefixtures("sandbox")
def test_running_a_bash_tool_loads_none_of_the_deferred_modules_and_each_loads_when_it_is_used(project: Path) -> None:
    _write_tool(project)
    _loaded(_RUN, (), project)  # the first run fills the store and the cache

    assert _loaded(_DEFERRED, (), project) == []


_COMMANDS = """
from importlib import import_module
from pkgutil import iter_modules
from kiwi_mcp.surfaces import cli, start
start.defer_modules()
for module in iter_modules(cli.__path__, "kiwi_mcp.surfaces.cli."):
    import_module(module.name)
"""


@pytest.mark.usefixtures("processes")
def test_the_modules_of_every_command_load_where_others_are_deferred() -> None:
    assert _loaded(_COMMANDS, ()) == []


class _BothAtOnce(dict[str, object]):
    """Lets two threads look something up before either goes on, as far as they can."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2)

    def get(self, key: str, default: object = None) -> object:
        found = super().get(key, default)
        with suppress(threading.BrokenBarrierError):
            self._both.wait(0.2)
        return found


def test_two_threads_that_use_a_deferred_module_at_once_load_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modules, loading = _BothAtOnce(), threading.Lock()
    loaded: list[SimpleNamespace] = []

    def load(name: str) -> object:
        with loading:
            if name not in modules:
                loaded.append(SimpleNamespace(number=len(loaded)))
                modules[name] = loaded[-1]
            return modules[name]

    monkeypatch.setattr(start, "sys", SimpleNamespace(modules=modules))
    monkeypatch.setattr(start, "import_module", load)
    module = modules["late"] = start.LateModule("late")

    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(lambda _: module.number, range(2)))

    assert numbers == [0, 0]
    assert len(loaded) == 1
