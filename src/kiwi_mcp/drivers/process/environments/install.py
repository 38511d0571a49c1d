"""Installers: the programs that fetch packages, held like what they fetch.

They reach the package indexes and nothing else, have no variable and no file of the user's, and write the folder that
they make. Beside it they have a cache of Kiwi's own, but only as long as nothing of what they fetch is run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import EnvironmentFailed
from kiwi_mcp.domain.isolation import Jail, Level, Limits
from kiwi_mcp.domain.outcome import Report
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.held import held_by
from kiwi_mcp.drivers.process.environments.indexes import Indexes, npm_indexes, uv_indexes
from kiwi_mcp.drivers.seen import needed_by
from kiwi_mcp.manifest.render import escape
from kiwi_mcp.primitives import subprocess
from kiwi_mcp.primitives.program import search_path
from kiwi_mcp.sandbox.profile import base_profile

_TIMEOUT = 600.0
_LAST_LINES = 12
_PASSED = {"LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS"}
_PASSED_STARTS = ("UV_", "npm_config_")
_PASSED_ENDS = ("_proxy",)
_SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_OWN_CACHE = ".cache"
_LIMITS = Limits(
    memory_bytes=4_294_967_296,
    tmp_bytes=1_073_741_824,
    open_files=8_192,
    workspace_bytes=17_179_869_184,
    workspace_files=1_000_000,
)


@dataclass(frozen=True, slots=True)
class Installer:
    """Runs installers for one call: where their caches lie, how strictly they are held, and who hears of it."""

    space: Space
    level: Level
    report: Report

    async def uv(
        self,
        argv: Sequence[str],
        folder: Path,
        *,
        reads: Sequence[str] = (),
        fetches: bool = True,
        builds: bool = False,
    ) -> subprocess.ProcessResult:
        """Run uv in a folder that it makes.

        `fetches` says whether it needs an index, `builds` whether code of packages is run, apart from the cache then.
        """
        indexes = uv_indexes(os.environ, Path.home())
        cache = folder / _OWN_CACHE if builds else self._cache("uv")
        own = {"UV_CACHE_DIR": str(cache), "UV_LINK_MODE": "copy", "UV_PYTHON_DOWNLOADS": "never"}
        try:
            return await self._run(argv, folder, own, indexes, cache, reads=reads, fetches=fetches, builds=builds)
        finally:
            if builds:
                shutil.rmtree(cache, ignore_errors=True)

    async def npm(self, argv: Sequence[str], folder: Path) -> subprocess.ProcessResult:
        """Run npm in a folder that it makes; scripts of packages are not run by what it is told."""
        indexes, cache = indexes_of_npm(), self._cache("npm")
        if indexes.lines:
            (folder / ".npmrc").write_text("\n".join(indexes.lines) + "\n", encoding="utf-8")
        return await self._run(argv, folder, {"npm_config_cache": str(cache)}, indexes, cache)

    async def _run(
        self,
        argv: Sequence[str],
        folder: Path,
        own: Mapping[str, str],
        indexes: Indexes,
        cache: Path,
        *,
        reads: Sequence[str] = (),
        fetches: bool = True,
        builds: bool = False,
    ) -> subprocess.ProcessResult:
        env = {**installer_env(os.environ), **dict(indexes.variables), **own, "HOME": str(cache)}
        jail = Jail(
            self.level,
            readable=(*reads, *indexes.paths, *_certificates(env), *needed_by(argv[0], env["PATH"])),
            writable=(str(folder), *(() if cache.is_relative_to(folder) else (str(cache),))),
            hosts=indexes.hosts if fetches else (),
            # Whoever says where their index is may mean one nearby. Where nobody does, an installer asks for its own,
            # at whatever address this machine finds it, as long as no code of packages has a say in that.
            private_hosts=indexes.hosts if fetches and (indexes.is_named or not builds) else (),
            limits=_LIMITS,
            provenance="builtin",
        )
        held = await held_by(jail, self.space)
        spec = ProcessSpec(argv=tuple(argv), cwd=str(folder), env=env, timeout=_TIMEOUT)
        return await held.run(spec, secrets={}, report=self.report)

    def _cache(self, name: str) -> Path:
        folder = self.space.cache / "packages" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder.resolve()


def indexes_of_npm() -> Indexes:
    """Return where npm fetches from on this machine."""
    return npm_indexes(os.environ, Path.home())


def install_level(level: Level) -> Level:
    """Return how strictly installers are held for code of some level; the strictest has no network, which they need."""
    return "sandboxed" if level == "restricted" else level


def installer_env(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return what an installer may see: where to look for packages and whom to trust there, no other variable."""
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


def _certificates(env: Mapping[str, str]) -> Iterator[str]:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS"):
        if (path := Path(env.get(name) or "/")).exists() and path != Path("/"):
            real = str(path.resolve())
            if not base_profile().covers(real):
                yield real


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
