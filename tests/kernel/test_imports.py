"""What the kernel loads before it is asked for anything: a client waits for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SELDOM = (
    "cryptography",
    "keyring",
    "kiwi_mcp.drivers.held",
    "kiwi_mcp.drivers.process",
    "kiwi_mcp.kernel.doctor",
    "kiwi_mcp.kernel.relaxing",
    "kiwi_mcp.kernel.why",
    "kiwi_mcp.primitives.egress",
    "kiwi_mcp.primitives.vault",
    "kiwi_mcp.sandbox.bubblewrap",
    "rich.status",
)
"""What only some calls need, and what takes long to load."""


def _loaded(program: str) -> list[str]:
    told = f"import sys\n{program}\nprint(*[name for name in {_SELDOM!r} if name in sys.modules])"
    words = [sys.executable, "-c", told]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.split()


@pytest.mark.parametrize("module", ["kiwi_mcp.kernel", "kiwi_mcp.surfaces.cli.app"])
def test_nothing_that_holds_processes_or_keys_is_loaded_before_it_is_used(module: str) -> None:
    assert _loaded(f"import {module}") == []


def test_whoever_starts_processes_loads_no_proxy_before_one_reaches_hosts() -> None:
    assert "kiwi_mcp.primitives.egress" not in _loaded("import kiwi_mcp.drivers.process")
