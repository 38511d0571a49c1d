"""Python environments: one folder for each set of requirements, made by uv, never changed afterwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache as remembered
from functools import partial
from pathlib import Path
from sysconfig import get_platform

import uv

from kiwi_mcp.domain.errors import CommandMissing
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.drivers.process.environments import Environment, address, refuse_others, text_in
from kiwi_mcp.drivers.process.environments.install import failure, install, is_done
from kiwi_mcp.drivers.process.once import make_once
from kiwi_mcp.drivers.process.words import texts
from kiwi_mcp.manifest.requirements import is_python_requirement, package_name

_COMMANDS = ("python", "python3")
_INTERPRETER = "bin/python"
_REQUIREMENTS = "requirements.txt"
_NAME = re.compile(r"^[A-Za-z0-9._-]+")


class Python:
    """The interpreter Kiwi runs on where nothing is required, else a virtual environment upon it."""

    def plan(self, tool: Tool, default_packages: Sequence[str], cache: Path) -> Environment:
        """Name the environment by interpreter, platform and requirements."""
        packages = _packages(tool, default_packages)
        if not packages:
            return self.bare()
        name = address(sys.version, get_platform(), base_interpreter(), *packages)
        folder = cache / "envs" / "python" / name
        return _environment(packages, folder=str(folder), python=str(folder / _INTERPRETER))

    def bare(self) -> Environment:
        """Name the interpreter that Kiwi runs on."""
        return _environment((), folder="", python=base_interpreter())

    async def make(self, environment: Environment, report: Report) -> None:
        """Install the requirements, unless they are there."""
        if environment.packages:
            build = partial(_build, packages=environment.packages, report=report)
            await make_once(Path(environment.folder), build, proof=_INTERPRETER)


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


def _installer() -> str:
    try:
        return uv.find_uv_bin()
    except FileNotFoundError:
        install = "Install Kiwi again with its dependencies, or `pip install uv` beside it."
        raise CommandMissing("uv", needed_by="python_runtime", install=install) from None


async def _build(folder: Path, *, packages: Sequence[str], report: Report) -> None:
    report(Progress(f"Installing {', '.join(packages)}"))
    program = _installer()
    made = await install((program, "venv", "--python", base_interpreter(), "--no-project", str(folder)), folder, report)
    if not is_done(made):
        raise failure(packages, made)
    wanted = folder / _REQUIREMENTS
    wanted.write_text("\n".join(packages) + "\n", encoding="utf-8")
    # Bytecode is compiled now, because tools run without writing any.
    command = (program, "pip", "install", "--compile-bytecode", "--python", str(folder / _INTERPRETER))
    result = await install((*command, "--offline", "--requirements", str(wanted)), folder, report)
    if not is_done(result):
        result = await install((*command, "--requirements", str(wanted)), folder, report)
    if not is_done(result):
        raise failure(packages, result)
