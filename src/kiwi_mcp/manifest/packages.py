"""The `packages` of a runtime: how the packages that its tools require are listed, locked and installed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from msgspec import Struct, convert

import kiwi_mcp.data
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.manifest.formats import Requirement
from kiwi_mcp.manifest.yaml import read_yaml

SHIPPED = ("python", "node")
_FOLDER = Path(kiwi_mcp.data.__file__).parent / "packages"


class PackageList(Struct, frozen=True, forbid_unknown_fields=True, rename={"form": "as"}):
    """The file in which a tool lists its packages: one on each line, or a JSON object of names and versions."""

    file: str
    form: Literal["lines", "json"]
    at: str = ""
    """The key of that JSON object."""


class PackageLock(Struct, frozen=True, forbid_unknown_fields=True, rename={"form": "as"}):
    """The file with the exact versions and hashes of packages."""

    file: str
    form: Literal["lines", "npm"]
    row: str = ""
    """A pattern that every line must match; its first group is the name of the package."""
    renew: str = ""
    """The command that writes the file anew, for messages."""


class InstallTry(Struct, frozen=True, forbid_unknown_fields=True):
    """One way to run a command: with more arguments, without a network, or with leave to build packages."""

    args: tuple[str, ...] = ()
    offline: bool = False
    builds: bool = False
    """Whether code of packages runs, apart from the cache of others then."""


class PackageIndex(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the owner says where packages are fetched from."""

    variables: tuple[str, ...] = ()
    settings: Literal["", "uv", "npm"] = ""
    """The program with settings, in variables and files, that count."""


class PackageConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How packages are installed.

    Commands may name `{folder}`, `{lock}`, `{requirements}`, `{python}`, `{packages}` and `{index}`; `env` may name
    `{folder}` and `{cache}`.
    """

    requirement: Requirement
    install: tuple[str, ...]
    listed_in: PackageList | None = None
    lock: PackageLock | None = None
    uses_python: bool = False
    """Whether the environment is based on the Python below Kiwi."""
    create: tuple[str, ...] = ()
    resolve: tuple[str, ...] = ()
    """The command that writes the lock."""
    tries: tuple[InstallTry, ...] = (InstallTry(),)
    """How `resolve` and `install` are tried, until one succeeds."""
    build_if: str = ""
    """A pattern of the error after which packages are built; without it they never are."""
    env: Mapping[str, str] = {}
    bin: str = ""
    programs: Mapping[str, str] = {}
    """Commands that mean a program of the environment."""
    link: str = ""
    """The folder of modules that must be found beside the tool's files."""
    proof: str = ""
    """A path that exists in every environment that is whole."""
    index: PackageIndex = PackageIndex()
    hint: str = ""
    """What to install if a command is missing."""


class Packages(Struct, frozen=True):
    """The packages of one runtime: a shipped package manager by its name, or the runtime's own."""

    kind: str
    config: PackageConfig
    is_shipped: bool


@cache
def shipped_packages(name: str) -> Packages:
    """Return a package manager that ships with Kiwi, which runtimes name as their `environment`."""
    path = _FOLDER / f"{name}.yaml"
    value = read_yaml(path.read_text(encoding="utf-8"), what=path.name).value
    return Packages(name, convert(value, PackageConfig), is_shipped=True)


def packages_of(config: JsonObject, old_name: str = "", runtime_id: str = "") -> Packages | None:
    """Return the packages of a runtime from its config; `old_name` is from an older spelling."""
    if written := as_object(config.get("packages")):
        return Packages(runtime_id, convert(written, PackageConfig), is_shipped=False)
    name = as_text(config.get("environment")) or _old_spelling(config) or old_name
    return shipped_packages(name) if name in SHIPPED else None


def _old_spelling(config: JsonObject) -> str:
    if as_object(config.get("venv")).get("enabled") is True or config.get("venv") is True:
        return "python"
    return "node" if config.get("npm_install") is True else ""
