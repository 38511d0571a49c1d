"""Python environments: one folder for each set of requirements, made by uv, never changed afterwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache as remembered
from functools import partial
from hashlib import sha256
from pathlib import Path
from sysconfig import get_platform

import uv

from kiwi_mcp.domain.errors import CommandMissing
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.drivers.process.environments import Environment, address, refuse_others, text_in
from kiwi_mcp.drivers.process.environments.install import Installer, failure, is_done
from kiwi_mcp.drivers.process.environments.locks import keep_lock, kept_lock, lock_failure, lock_of, refuse_lock
from kiwi_mcp.drivers.process.once import make_once
from kiwi_mcp.drivers.words import texts
from kiwi_mcp.manifest.requirements import is_python_requirement, package_name
from kiwi_mcp.primitives.subprocess import ProcessResult
from kiwi_mcp.sandbox.profile import base_profile
from kiwi_mcp.sandbox.programs import program_at

_COMMANDS = ("python", "python3")
INTERPRETER = "bin/python"
_REQUIREMENTS = "requirements.txt"
_LOCK = "requirements.lock"
_ROW = re.compile(
    r"([\w.-]+)(?:\[[\w., -]*\])? *== *[\w.!+-]+(?: *;(?:(?!\s-)[^#\\])*?)?"
    r"(?:\s+--hash=sha(?:256|384|512):[0-9a-f]+)+",
    re.ASCII,
)
"""A line of a lock: it names no address, no file and no option but hashes."""
_COMMENT = re.compile(r"^[ \t\f]*#.*$", re.MULTILINE)
_RENEW = f"uv pip compile --generate-hashes --output-file {_LOCK} {_REQUIREMENTS}"
_SHOWN = 80
_NAME = re.compile(r"^[A-Za-z0-9._-]+")
_WANTS_BUILD = re.compile(rb"source distributions is disabled|no usable wheels|from source is disabled", re.IGNORECASE)
"""What uv says where a package is there only as source."""


class Python:
    """The interpreter Kiwi runs on where nothing is required, else a virtual environment upon it."""

    def plan(self, tool: Tool, default_packages: Sequence[str], cache: Path) -> Environment:
        """Name the environment by interpreter, platform and requirements."""
        packages, lock = _packages(tool, default_packages), text_in(tool, _LOCK)
        if not packages:
            return self.bare()
        if lock:
            _refuse_unlocked(tool, packages, lock)
        own = (sha256(lock.encode()).hexdigest(),) if lock else ()
        folder = cache / "envs" / "python" / address(sys.version, get_platform(), base_interpreter(), *packages, *own)
        made = _environment(packages, folder=str(folder), python=str(folder / INTERPRETER))
        return replace(made, lock=_LOCK) if lock else made

    def bare(self) -> Environment:
        """Name the interpreter that Kiwi runs on."""
        return _environment((), folder="", python=base_interpreter())

    async def make(self, environment: Environment, tool: Tool, installer: Installer) -> None:
        """Install the requirements by their lock, unless they are there."""
        if environment.packages:
            own = text_in(tool, environment.lock) if environment.lock else ""
            build = partial(_build, packages=environment.packages, own=own, installer=installer)
            await make_once(Path(environment.folder), build, proof=INTERPRETER)


def _environment(packages: tuple[str, ...], *, folder: str, python: str) -> Environment:
    return Environment(
        kind="python",
        folder=folder,
        packages=packages,
        bin=str(Path(python).parent),
        programs=dict.fromkeys(_COMMANDS, python),
    )


@remembered
def base_interpreter() -> str:
    """Return the interpreter that stands below any virtual environment Kiwi itself runs in."""
    # Python keeps it under a private name only; without one, this process runs in no virtual environment.
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def _packages(tool: Tool, default_packages: Sequence[str]) -> tuple[str, ...]:
    lines = (line.partition(" #")[0].strip() for line in text_in(tool, _REQUIREMENTS).splitlines())
    listed = [line for line in lines if line and not line.startswith("#")]
    written = [*default_packages, *texts(tool.manifest.config.get("requires")), *listed]
    refuse_others(tool, written, is_python_requirement)
    return tuple(sorted({_normal(requirement) for requirement in written}))


def _normal(requirement: str) -> str:
    """Return a requirement in the one spelling that it shares with others that mean the same."""
    versions, mark, marker = requirement.partition(";")
    rest = _NAME.sub("", "".join(versions.split()))
    return f"{package_name(versions)}{rest}{mark}{marker.strip()}"


def uv_program() -> str:
    """Return where uv is."""
    try:
        return uv.find_uv_bin()
    except FileNotFoundError:
        install = "Install Kiwi again with its dependencies, or `pip install uv` beside it."
        raise CommandMissing("uv", needed_by="python_runtime", install=install) from None


async def _build(folder: Path, *, packages: Sequence[str], own: str, installer: Installer) -> None:
    installer.report(Progress(f"Installing {', '.join(packages)}"))
    await make_venv(folder, packages, installer)
    await install_locked(folder, packages, own, installer)


async def install_locked(folder: Path, packages: Sequence[str], own: str, installer: Installer) -> Path:
    """Install packages into a virtual environment by a lock, and return the lock.

    It is the one that is given or, where that is empty, the one of the first time, which is made now if it is now.
    """
    lock = folder / _LOCK
    if text := own or kept_lock(folder):
        lock.write_text(text, encoding="utf-8")
    else:
        result = await locked(folder, packages, lock, installer)
        if not is_done(result):
            raise failure(packages, result)
        keep_lock(folder, lock)
    result = await fetched(folder, ("--require-hashes", "--requirements", str(lock)), installer)
    if not is_done(result):
        raise lock_failure(packages, result, _LOCK if own else str(lock_of(folder)))
    return lock


def _refuse_unlocked(tool: Tool, packages: Sequence[str], lock: str) -> None:
    """Refuse a lock that leaves out a requirement, or says anything but versions and hashes."""
    rows = {line: _ROW.fullmatch(line) for line in _lines(lock)}
    known = {package_name(row[1]) for row in rows.values() if row}
    odd = [f"{line[:_SHOWN]!r} is not a version with its hashes" for line, row in rows.items() if row is None]
    missing = [one for one in packages if package_name(one.partition(";")[0]) not in known]
    refuse_lock(tool, [*odd, *(f"{one!r} is not locked" for one in missing)], _LOCK, _RENEW)


def _lines(lock: str) -> Sequence[str]:
    """Return what a lock says, line by line as uv reads it: a comment ends with its line, whatever stands there."""
    plain = lock.replace("\r\n", "\n").replace("\r", "\n")
    joined = _COMMENT.sub("", plain).replace("\\\n", " ")
    return [*filter(None, (line.strip() for line in joined.split("\n")))]


async def make_venv(folder: Path, packages: Sequence[str], installer: Installer) -> None:
    """Make a virtual environment for some packages upon the interpreter that stands below Kiwi."""
    # What holds the installer may put empty folders into this one meanwhile.
    argv = (uv_program(), "venv", "--allow-existing", "--no-project", "--python", base_interpreter(), str(folder))
    made = await installer.uv(argv, folder, reads=_roots(), fetches=False)
    if not is_done(made):
        raise failure(packages, made)


async def fetched(folder: Path, wanted: Sequence[str], installer: Installer) -> ProcessResult:
    """Install what is wanted into a virtual environment: from the cache, else from an index, else built from source.

    Only what is built runs code of its own, so that it is fetched anew then, apart from what others use.
    """
    # Bytecode is compiled now, because tools run without writing any.
    argv = (uv_program(), "pip", "install", "--compile-bytecode", "--python", str(folder / INTERPRETER), *wanted)
    reads = _roots()
    result = await installer.uv((*argv, "--offline", "--no-build"), folder, reads=reads, fetches=False)
    if not is_done(result):
        result = await installer.uv((*argv, "--no-build"), folder, reads=reads)
    if not is_done(result) and _WANTS_BUILD.search(result.stderr):
        result = await installer.uv(argv, folder, reads=reads, builds=True)
    return result


async def locked(folder: Path, packages: Sequence[str], lock: Path, installer: Installer) -> ProcessResult:
    """Write into a lock which version of each package is meant, and of all they need, with the hashes of each."""
    wanted = folder / _REQUIREMENTS
    wanted.write_text("\n".join(packages) + "\n", encoding="utf-8")
    how = ("--quiet", "--generate-hashes", "--no-header", "--no-annotate", "--python", str(folder / INTERPRETER))
    argv = (uv_program(), "pip", "compile", *how, "--output-file", str(lock), str(wanted))
    result = await installer.uv((*argv, "--offline", "--no-build"), folder, reads=_roots(), fetches=False)
    if not is_done(result):
        result = await installer.uv((*argv, "--no-build"), folder, reads=_roots())
    if not is_done(result) and _WANTS_BUILD.search(result.stderr):
        result = await installer.uv(argv, folder, reads=_roots(), builds=True)
    return result


def _roots() -> tuple[str, ...]:
    """Return what the interpreter below Kiwi needs to be seen of."""
    return program_at(base_interpreter(), base_profile().covers).roots
