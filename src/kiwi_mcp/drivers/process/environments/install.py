"""Installers: the programs that fetch packages, started with an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from kiwi_mcp.domain.errors import EnvironmentFailed
from kiwi_mcp.domain.outcome import Report
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.process.surroundings import search_path
from kiwi_mcp.manifest.render import escape
from kiwi_mcp.primitives import subprocess

_TIMEOUT = 600.0
_LAST_LINES = 12
_PASSED = {"HOME", "LANG", "TMPDIR", "XDG_CACHE_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS"}
_PASSED_STARTS = ("UV_", "npm_config_")
_PASSED_ENDS = ("_proxy",)
_SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


async def install(argv: Sequence[str], cwd: Path, report: Report) -> subprocess.ProcessResult:
    """Run an installer in a folder and return what it said."""
    spec = ProcessSpec(argv=tuple(argv), cwd=str(cwd), env=installer_env(os.environ), timeout=_TIMEOUT)
    return await subprocess.run(spec, secrets={}, report=report)


def installer_env(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return what an installer may see: where to look for packages and how to reach it, no other variable."""
    passed = {name: escape(value) for name, value in environ.items() if _is_passed(name)}
    index = environ.get("PIP_INDEX_URL")
    if index and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & environ.keys():
        passed["UV_DEFAULT_INDEX"] = escape(index)
    if _SYSTEM_CERTIFICATES.is_file():
        # A network may stand behind an authority of its own, which only the machine knows.
        passed.setdefault("UV_SYSTEM_CERTS", "1")
        passed.setdefault("NODE_EXTRA_CA_CERTS", str(_SYSTEM_CERTIFICATES))
    return {**passed, "PATH": escape(search_path()), "NO_COLOR": "1"}


def _is_passed(name: str) -> bool:
    return name in _PASSED or name.startswith(_PASSED_STARTS) or name.lower().endswith(_PASSED_ENDS)


def is_done(result: subprocess.ProcessResult) -> bool:
    """Whether an installer came to its end without a complaint."""
    return result.exit_code == 0 and not result.timed_out


def failure(packages: Sequence[str], result: subprocess.ProcessResult) -> EnvironmentFailed:
    """Return the error that quotes an installer's last lines."""
    said = (result.stderr or result.stdout).decode("utf-8", errors="replace").strip()
    lines = "\n".join(said.splitlines()[-_LAST_LINES:])
    ending = f"did not end within {_TIMEOUT:.0f} seconds" if result.timed_out else "failed"
    return EnvironmentFailed(
        f"Installing {', '.join(packages)} {ending}: {lines}",
        suggestion="Check the names and versions that the tool requires, and that the package index can be reached.",
        packages=list(packages),
    )
