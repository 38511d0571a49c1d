"""Type sheets: what an item of each type may say, and how it is run. A type is data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from errno import EINVAL
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import Literal, cast

import kiwi_mcp.data
from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.document import MAX_BYTES
from kiwi_mcp.manifest.schema import faults, schema_faults
from kiwi_mcp.manifest.yaml import read_yaml

Need = Literal["required", "none", "optional"]

BUILT_IN = Path(kiwi_mcp.data.__file__).parent / "types"
AT_HOME = ("", "read", "composite")
"""Drivers that do not reach the world themselves; what any other one drives must stand on a primitive."""
MAX_SHEETS = 1_000
"""The most sheets that one folder may hold; more are not read."""

_NAMES: JsonObject = {"type": "array", "items": {"type": "string"}}
_NEED: JsonObject = {"enum": ["required", "none", "optional"]}
_SHEET: JsonObject = {
    "type": "object",
    "additionalProperties": False,
    "required": ["type", "driver", "needs_executor", "files", "config"],
    "properties": {
        "type": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,63}$"},
        "description": {"type": "string"},
        "driver": {"type": "string", "pattern": "^[a-z_]{0,63}$"},
        "executor_types": _NAMES,
        "executor_ids": _NAMES,
        "needs_executor": _NEED,
        "files": _NEED,
        "default_executor": {"type": "string"},
        "aliases": {"type": "object", "additionalProperties": {"type": "string"}},
        "config": {"type": "object"},
        "by_executor": {"type": "object", "additionalProperties": {"type": "object"}},
        "templates": _NAMES,
        "ids": _NAMES,
        "effect": {"enum": ["", "pure", "idempotent", "at_most_once", "transactional"]},
    },
}


@dataclass(frozen=True, slots=True)
class Sheet:
    """The rules of one type.

    What stands below must have one of `executor_types` and, where `executor_ids` names any, one of those names.
    """

    type: str
    description: str
    driver: str
    executor_types: tuple[str, ...]
    executor_ids: tuple[str, ...]
    needs_executor: Need
    files: Need
    default_executor: str
    aliases: Mapping[str, str]
    """Old spellings of the type, and the executor each one means."""
    config: JsonObject
    by_executor: Mapping[str, JsonObject]
    """What the config must also be where a certain executor stands below."""
    templates: tuple[str, ...]
    """The config words in which `{name}` must be a parameter."""
    ids: tuple[str, ...]
    """The only names that items of this type have; empty where any will do."""
    effect: str

    @property
    def words(self) -> tuple[str, ...]:
        """The words an item of this type may write under `config`."""
        return tuple(as_object(self.config.get("properties")))


@dataclass(frozen=True, slots=True)
class Sheets:
    """Every type that is known here, and what was wrong with sheets that were left out."""

    by_type: Mapping[str, Sheet]
    issues: tuple[Issue, ...] = ()
    aliases: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def get(self, type: str) -> Sheet | None:  # noqa: A002 - the word of the data
        """Return the sheet of a type."""
        return self.by_type.get(type)

    def types(self) -> tuple[str, ...]:
        """Return the types, in order."""
        return tuple(sorted(self.by_type))

    def carries(self, type: str, driver: str) -> bool:  # noqa: A002 - the word of the data
        """Whether items of a type are what those that a driver drives stand on."""
        return any(type in sheet.executor_types for sheet in self.by_type.values() if sheet.driver == driver)

    def canonical(self, word: str) -> tuple[str, str]:
        """Return the type a word means and the executor it implies; a type itself implies none."""
        return (word, "") if word in self.by_type else self.aliases.get(word, (word, ""))


def load_sheets(*folders: Path) -> Sheets:
    """Return the built-in sheets with those of the folders on top; a later folder wins."""
    return _load(tuple(_listing(folder) for folder in (BUILT_IN, *folders)))


def _listing(folder: Path) -> tuple[tuple[str, int, int], ...]:
    # What changed is seen by name, time and size, so unchanged sheets are read once.
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix in {".yaml", ".yml"})
        return tuple((str(path), (stat := path.lstat()).st_mtime_ns, stat.st_size) for path in paths[:MAX_SHEETS])
    except OSError:
        return ()


@lru_cache(maxsize=64)
def _load(listings: tuple[tuple[tuple[str, int, int], ...], ...]) -> Sheets:
    by_type: dict[str, Sheet] = {}
    issues: list[Issue] = []
    for layer, listing in enumerate(listings):
        for name, _, _ in listing:
            path = Path(name)
            sheet = _read(path, issues)
            if sheet is not None and layer and sheet.type == "primitive":
                issues.append(Issue(path.name, "primitives are code, not data", "Declare a runtime instead."))
            elif sheet is not None:
                by_type[sheet.type] = sheet
    aliases = {word: (sheet.type, executor) for sheet in by_type.values() for word, executor in sheet.aliases.items()}
    return Sheets(by_type, tuple(issues), aliases)


def _read(path: Path, issues: list[Issue]) -> Sheet | None:
    try:
        value = as_object(read_yaml(_text(path), what=path.name).value)
    except (OSError, UnicodeDecodeError) as error:
        issues.append(Issue(path.name, f"cannot be read: {error}", "Make it a readable UTF-8 file."))
        return None
    except InvalidManifest as error:
        issues += [replace(issue, place=f"{path.name}.{issue.place}".rstrip(".")) for issue in error.issues]
        return None
    found = _faults(value, path.name)
    issues += found
    return None if found else _sheet(value)


def _text(path: Path) -> str:
    # A project wrote it: a link, a pipe or a device would lead elsewhere, or never end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(EINVAL, "it is not a regular file")
        return file.read(MAX_BYTES + 1).decode()  # one byte over the limit is enough to be refused for it


def _faults(value: JsonObject, name: str) -> Sequence[Issue]:
    found = faults(_SHEET, value, place=name)
    if found:
        return found
    config = as_object(value["config"])
    if config.get("additionalProperties") is not False:
        found.append(
            Issue(f"{name}.config", "is open", "Add `additionalProperties: false`: each link has its own words.")
        )
    if value["driver"] not in AT_HOME and (value["needs_executor"] != "required" or not value.get("executor_types")):
        fix = "Write `needs_executor: required` and name its `executor_types`."
        found.append(Issue(f"{name}.driver", f"`{value['driver']}` drives only what stands on a primitive", fix))
    for executor, rule in as_object(value.get("by_executor")).items():
        found += schema_faults(as_object(rule), f"{name}.by_executor.{executor}")
    return found + schema_faults(config, f"{name}.config")


def _sheet(value: JsonObject) -> Sheet:
    return Sheet(
        type=as_text(value["type"]),
        description=as_text(value.get("description")),
        driver=as_text(value["driver"]),
        executor_types=_names(value, "executor_types"),
        executor_ids=_names(value, "executor_ids"),
        needs_executor=cast("Need", value["needs_executor"]),
        files=cast("Need", value["files"]),
        default_executor=as_text(value.get("default_executor")),
        aliases={word: as_text(executor) for word, executor in as_object(value.get("aliases")).items()},
        config=as_object(value["config"]),
        by_executor={name: as_object(rule) for name, rule in as_object(value.get("by_executor")).items()},
        templates=_names(value, "templates"),
        ids=_names(value, "ids"),
        effect=as_text(value.get("effect")),
    )


def _names(value: JsonObject, word: str) -> tuple[str, ...]:
    return tuple(as_text(name) for name in as_list(value.get(word)))
