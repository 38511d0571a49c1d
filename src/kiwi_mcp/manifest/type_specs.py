"""Type specs: what each type of item may contain, as loaded from data files, checked and looked up."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EINVAL
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import Literal, TypeAlias, get_args

from msgspec import Struct, convert, field
from msgspec.structs import replace

from kiwi_mcp.data import FOLDER, parsed
from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import SOURCE_TRAITS, DefinedBy, ItemType, Lifetime, ResultKind, Source, TypeTraits
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.manifest.document import MAX_BYTES, read_yaml
from kiwi_mcp.manifest.files import RACY, FileStamp, Stamps, are_fresh, settled, stamp_of
from kiwi_mcp.manifest.json_schema import faults, schema_faults

Need = Literal["required", "none", "optional"]
Reader = Literal["directive", "front_matter", "skill"]
"""How a text file is read as an item: as a directive in XML, a text with YAML front matter, or a skill."""
DefinedIn = Literal["builtin", "user", "project"]

BUILT_IN = FOLDER / "types"
AT_HOME = ("", "read", "composite", "native", "code")
"""Drivers without access to the outside world. Items of any other driver need an executor."""
_BEGINS: Mapping[Reader, re.Pattern[str]] = {
    "directive": re.compile(r"<directive[^>]*>"),
    "front_matter": re.compile(r"\A---\n"),
    "skill": re.compile(r"(?!)"),
}
"""How a text outside of the folder of its type shows that it is an item."""
MAX_SHEETS = 1_000
"""The maximum number of type specs that are read from one folder."""

_RESERVED_FOLDERS = frozenset(
    {"types", "memory", "skills", "conversations", "servers", "providers", "outputs", "state", "registry", "keys"}
    | {"secrets", "trust", "checkpoints", "extractors", "parsers", "lib", "node_modules", "cache"}
)
"""Folders of an `.ai` folder that hold no items, now or in a later release."""

_FOLDER: JsonObject = {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,63}$"}
_NAMES: JsonObject = {"type": "array", "items": {"type": "string"}}
_NEED: JsonObject = {"enum": list(get_args(Need))}
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
        "references": {"type": "object", "additionalProperties": {"type": "string"}},
        "inputs_for": {"type": "string"},
        "ids": _NAMES,
        "effect": {"enum": ["", "pure", "idempotent", "at_most_once", "transactional"]},
        "lifetime": {"enum": list(get_args(Lifetime))},
        "defined_by": {"enum": list(get_args(DefinedBy))},
        "result_kind": {"enum": list(get_args(ResultKind))},
        "folder": _FOLDER,
        "old_folders": {"type": "object", "propertyNames": _FOLDER, "additionalProperties": {"enum": [".py"]}},
        "format": {
            "type": "object",
            "additionalProperties": False,
            "required": ["suffix", "reader"],
            "properties": {
                "suffix": {"enum": [".md"]},
                "reader": {"enum": list(get_args(Reader))},
                "config": _NAMES,
                "defaults": {"type": "object"},
                "file": {"const": "SKILL.md"},
            },
        },
    },
}


class FileFormat(Struct, frozen=True):
    """How items of a type are written, if each is one text file."""

    suffix: str
    reader: Reader
    config: tuple[str, ...] = ()
    """The keys of the front matter that belong to `config`."""
    defaults: JsonObject = {}
    """The config of an item that does not set these keys."""
    file: str = ""
    """The name of the file that makes a folder one item; empty where only manifests do."""


class ItemFolder(Struct, frozen=True):
    """A folder below `.ai` with items in it, and the files that may be items there."""

    name: str
    suffix: str = ""
    """Only files with this suffix are items; empty where the content of a file decides."""
    type: str = ""
    """The type of everything in it that is one file; empty where each manifest says its type."""
    is_old: bool = False
    """Whether items were in it in the past, and are still found there."""
    defined_in: DefinedIn = "builtin"
    file: str = ""
    """The name of the file that makes a folder in it one item, beside the names of manifests."""


TOOLS = ItemFolder("tools")
"""The folder of items with manifests that say their type."""
PROVIDERS = ItemFolder("providers")
"""The folder of model providers, which only the user's space has: they are runtimes like those in `tools`."""


class TypeSpec(Struct, frozen=True):
    """The rules of one type; an executor has one of `executor_types` and, if any are named, of `executor_ids`."""

    type: str
    needs_executor: Need
    files: Need
    config: JsonObject
    defined_in: DefinedIn
    """Where the type spec is: its folder is looked for only there, and in what sees that place."""
    traits: TypeTraits
    """What the kernel and the policy read. Items that return no data are requested by the name of their type."""
    description: str = ""
    executor_types: tuple[str, ...] = ()
    executor_ids: tuple[str, ...] = ()
    default_executor: str = ""
    aliases: Mapping[str, str] = {}
    """Old spellings of the type, and the executor each one means."""
    by_executor: Mapping[str, JsonObject] = {}
    """What the config must also be with a certain executor."""
    templates: tuple[str, ...] = ()
    """The config keys in which `{name}` must be a parameter."""
    references: Mapping[str, str] = {}
    """The config keys that name another item, and the item type that each one names."""
    inputs_for: str = ""
    """The config key that names the item which gets the parameters as its inputs; empty where there is none."""
    ids: tuple[str, ...] = ()
    """The only names that items of this type have; empty where any will do."""
    effect: str = ""
    folder: str = TOOLS.name
    """Where new items of this type are written, below `.ai`."""
    old_folders: Mapping[str, str] = {}
    """Folders where items of this type are still looked for, with the suffix of their files."""
    format: FileFormat | None = None
    """How its items are written; None if they are code or manifests."""

    @property
    def driver(self) -> str:
        """The driver of items of this type; empty if they cannot be run."""
        return self.traits.driver

    @property
    def words(self) -> tuple[str, ...]:
        """The words an item of this type may write under `config`."""
        return tuple(as_object(self.config.get("properties")))


class TypeSpecs(Struct, frozen=True):
    """Every known type, and the faults of the type specs that were left out."""

    by_type: Mapping[str, TypeSpec]
    issues: tuple[Issue, ...] = ()
    aliases: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    folders: Mapping[str, ItemFolder] = field(default_factory=dict)
    """The folders of items, by name."""

    def get(self, type: str) -> TypeSpec | None:  # noqa: A002 - the word of the data
        """Return the spec of a type."""
        return self.by_type.get(type)

    def folders_of(self, source: Source) -> Mapping[str, ItemFolder]:
        """Return the folders of items in a source; the type of a project says nothing about the user's folders."""
        seen = {"builtin", source, *(["user"] if SOURCE_TRAITS[source].is_in_project else [])}
        found = {name: folder for name, folder in self.folders.items() if folder.defined_in in seen}
        return {PROVIDERS.name: PROVIDERS, **found} if SOURCE_TRAITS[source].is_in_user_space else found

    def written_as(self, path: Path, text: str) -> tuple[TypeSpec, FileFormat] | None:
        """Return the type and format of an item that is one text file: its folder decides, elsewhere its text."""
        above = (self.folders[part].type for part in reversed(path.parts[:-1]) if part in self.folders)
        named = [one for one in self.by_type.values() if one.format and one.format.file == path.name]
        known = named or [self.by_type[kind] for kind in above if kind]
        likely = known[:1] or [spec for spec in self.by_type.values() if spec.defined_in == "builtin"]
        for spec in likely:
            is_written_so = spec.format is not None and spec.format.suffix == path.suffix.lower()
            if spec.format and is_written_so and (known or _BEGINS[spec.format.reader].search(text)):
                return spec, spec.format
        return None

    def with_suffix(self, suffix: str) -> TypeSpec | None:
        """Return the first type with items that are text files with a suffix; None if there is none."""
        return next((spec for spec in self.by_type.values() if spec.format and spec.format.suffix == suffix), None)

    def types(self) -> tuple[str, ...]:
        """Return the types, in order."""
        return tuple(sorted(self.by_type))

    def traits(self, type: str) -> TypeTraits:  # noqa: A002 - the word of the data
        """Return the traits of a type; an unknown type has none, so that nothing of it runs."""
        sheet = self.by_type.get(type)
        return sheet.traits if sheet else TypeTraits()

    def is_server(self, type: str) -> bool:  # noqa: A002 - the word of the data
        """Whether items of a type are servers."""
        return self.traits(type).is_server

    def is_skill(self, type: str) -> bool:  # noqa: A002 - the word of the data
        """Whether items of a type give instructions, and have no executor that could carry them out."""
        sheet = self.by_type.get(type)
        return sheet is not None and sheet.traits.result_kind == "instructions" and sheet.needs_executor == "none"

    def runs_in_process(self, type: str) -> bool:  # noqa: A002 - the word of the data
        """Whether items of a type are part of a process that lives for one call: its tool, or a link below the tool."""
        per_call = (sheet for sheet in self.by_type.values() if sheet.traits.lifetime == "call")
        return any(type == sheet.type or type in sheet.executor_types for sheet in per_call)

    def item_type(self, type: str) -> ItemType:  # noqa: A002 - the word of the data
        """Return the name that requests use for items of a type."""
        sheet = self.by_type.get(type)
        return "tool" if sheet is None or sheet.traits.result_kind == "data" else type

    def item_type_in(self, folder: str) -> ItemType | None:
        """Return what requests call the items in a folder; None if they may be of any type."""
        here = self.folders.get(folder, TOOLS)
        return self.item_type(here.type) if here.type else None

    def canonical(self, word: str) -> tuple[str, str]:
        """Return the type a word means and the executor it implies; a type itself implies none."""
        return (word, "") if word in self.by_type else self.aliases.get(word, (word, ""))


def load_type_specs(*folders: Path, user: Path | None = None) -> TypeSpecs:
    """Return the built-in type specs, those of a user and those of a project's folders; none redefines another."""
    users = _listing(user) if user else ()
    return _load(_listing(BUILT_IN), users, tuple(_listing(folder) for folder in folders if folder != user))


_Version: TypeAlias = FileStamp | str
"""What differs between two versions of a file: its stamp, or its text while two writes may have the same stamp."""
_Listing: TypeAlias = tuple[tuple[str, _Version], ...]


def _listing(folder: Path) -> _Listing:
    # Each version of a type spec is read once.
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix in {".yaml", ".yml"})
    except OSError:
        return ()
    return tuple((str(path), _version(path)) for path in paths[:MAX_SHEETS])


def _version(path: Path) -> _Version:
    stamp = settled(stamp_of(str(path)))
    if stamp is RACY:
        with suppress(OSError, UnicodeDecodeError):  # reported where it is parsed
            return _text(path)
    return stamp


@lru_cache(maxsize=64)
def _load(built_in_files: _Listing, user_files: _Listing, project_files: tuple[_Listing, ...]) -> TypeSpecs:
    issues: list[Issue] = []
    built_in = _joined({sheet.type: sheet for _, sheet in _each([built_in_files], issues, {}, "builtin")})
    by_type = dict(built_in.by_type)
    usual = {sheet.driver: sheet.traits for sheet in by_type.values() if sheet.driver}
    added = [*_each([user_files], issues, usual, "user"), *_each(project_files, issues, usual, "project")]
    known = built_in
    for name, sheet in added:
        if refused := _redefined(sheet, name, known) or _foreign_traits(sheet, name, built_in):
            issues.append(refused)
        else:
            by_type[sheet.type] = sheet
            known = _joined(by_type)
    for name, sheet in added:
        if by_type.get(sheet.type) is sheet and (refused := _mixed_lifetimes(sheet, name, by_type)):
            issues.append(refused)
            del by_type[sheet.type]
    return _joined(by_type, tuple(issues))


def _each(
    listings: Iterable[_Listing], issues: list[Issue], usual: Mapping[str, TypeTraits], defined_in: DefinedIn
) -> Iterator[tuple[str, TypeSpec]]:
    """Yield the name and the content of each type spec that can be read."""
    for path, version in (one for listing in listings for one in listing):
        value, found = _value(path, version)
        issues += found
        if value is not None:
            # Traits that it does not set are as usual for its driver.
            like = usual.get(as_text(value["driver"]), TypeTraits())
            traits = convert({"lifetime": like.lifetime, "defined_by": like.defined_by, **value}, TypeTraits)
            yield Path(path).name, convert({**value, "defined_in": defined_in, "traits": traits}, TypeSpec)


def _joined(by_type: Mapping[str, TypeSpec], issues: tuple[Issue, ...] = ()) -> TypeSpecs:
    aliases = {word: (sheet.type, executor) for sheet in by_type.values() for word, executor in sheet.aliases.items()}
    folders = {TOOLS.name: TOOLS}
    for sheet in by_type.values():
        name, place = sheet.folder, sheet.defined_in
        if form := sheet.format:
            folders[name] = ItemFolder(name, form.suffix, sheet.type, defined_in=place, file=form.file)
        for folder, suffix in sheet.old_folders.items():
            folders[folder] = ItemFolder(folder, suffix, is_old=True, defined_in=place)
    return TypeSpecs(by_type, issues, aliases, folders)


def _redefined(sheet: TypeSpec, name: str, known: TypeSpecs) -> Issue | None:
    """Return the issue of a type spec that redefines a type, an alias or a folder: a project could avoid its checks."""
    if sheet.type == "primitive":
        return Issue(name, "primitives are code, not data", "Declare a runtime instead.")
    if other := known.get(sheet.type):
        what = "a built-in type" if other.defined_in == "builtin" else "a type already"
        reason = f"`{sheet.type}` is {what}, which no folder redefines; this file is ignored"
        return Issue(f"{name}.type", reason, "Give the type a name of its own, or remove the file.")
    taken = next((word for word in sheet.aliases if word in known.by_type or word in known.aliases), None)
    if taken is not None:
        reason = f"`{taken}` already means the type `{known.canonical(taken)[0]}`; this file is ignored"
        return Issue(f"{name}.aliases.{taken}", reason, "Remove the alias.")
    fix = "Give the type a folder of its own, such as its name, and a `format`."
    if sheet.old_folders:
        return Issue(f"{name}.old_folders", "is for built-in types alone; this file is ignored", "Remove it.")
    if sheet.format is None and sheet.folder != TOOLS.name:
        return Issue(f"{name}.folder", "needs a `format`, which says how its files are read", fix)
    if sheet.format is not None and (sheet.folder in known.folders or sheet.folder in _RESERVED_FOLDERS):
        return Issue(f"{name}.folder", f"`{sheet.folder}` holds something else; this file is ignored", fix)
    return None


def _foreign_traits(sheet: TypeSpec, name: str, built_in: TypeSpecs) -> Issue | None:
    """Return the issue of a new type with a lifetime or an author that no built-in type of its driver has.

    Otherwise a cloned project could add a type for tools of MCP servers that says that its owner wrote them.
    """
    known = [one.traits for one in built_in.by_type.values() if one.driver == sheet.driver]
    # A driver without a built-in type was added to this installation. Its types have the default traits.
    allowed = {(one.lifetime, one.defined_by) for one in known or [TypeTraits()]}
    if (sheet.traits.lifetime, sheet.traits.defined_by) in allowed:
        return None
    spelled = " or ".join(f"`lifetime: {lifetime}` with `defined_by: {author}`" for lifetime, author in sorted(allowed))
    reason = f"a type of the driver `{sheet.driver}` has {spelled}; this file is ignored"
    return Issue(f"{name}.lifetime", reason, "Leave `lifetime` and `defined_by` out, or write them like that.")


def _mixed_lifetimes(sheet: TypeSpec, name: str, by_type: Mapping[str, TypeSpec]) -> Issue | None:
    """Return the issue of a type that mixes servers with other items in a chain.

    The items of a server are trusted as far as the owner accepted the server, so they run on a server and nothing
    else runs on one.
    """
    below = {by_type[kind].traits.lifetime == "server" for kind in sheet.executor_types if kind in by_type}
    is_served = sheet.traits.lifetime == "server"
    if is_served and sheet.driver and below != {True}:
        reason = "runs in the process of a server, and so on servers alone; this file is ignored"
    elif not is_served and True in below:
        reason = "names a server among its `executor_types` and is no item of a server; this file is ignored"
    else:
        return None
    return Issue(f"{name}.executor_types", reason, "Name types of the same `lifetime`.")


@lru_cache(maxsize=MAX_SHEETS)
def _value(name: str, version: _Version) -> tuple[JsonObject | None, Sequence[Issue]]:
    """Return the content of a type spec, or None and its faults."""
    path = Path(name)
    try:
        text = version if isinstance(version, str) else _text(path)
        if path.parent == BUILT_IN and (known := parsed(text)) is not None:
            return known, ()  # the tests check it, so no start has to
        value = as_object(read_yaml(text, what=path.name).value)
    except (OSError, UnicodeDecodeError) as error:
        return None, [Issue(path.name, f"cannot be read: {error}", "Make it a readable UTF-8 file.")]
    except InvalidManifest as error:
        return None, [replace(issue, place=f"{path.name}.{issue.place}".rstrip(".")) for issue in error.issues]
    found = faults_of(value, path.name)
    return None if found else value, found


def _text(path: Path) -> str:
    # A project wrote it: a link, a pipe or a device would lead elsewhere, or never end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(EINVAL, "it is not a regular file")
        return file.read(MAX_BYTES + 1).decode()  # one byte over the limit is enough to be refused for it


def faults_of(value: JsonObject, name: str) -> Sequence[Issue]:
    """Return every fault of a type spec."""
    found = faults(_SHEET, value, place=name)
    if found:
        return found
    config = as_object(value["config"])
    if config.get("additionalProperties") is not False:
        fix = "Add `additionalProperties: false`: each link has its own words."
        found.append(Issue(f"{name}.config", "is open", fix))
    if value["driver"] not in AT_HOME and (value["needs_executor"] != "required" or not value.get("executor_types")):
        fix = "Write `needs_executor: required` and name its `executor_types`."
        found.append(Issue(f"{name}.driver", f"`{value['driver']}` drives only items on a primitive", fix))
    for executor, rule in as_object(value.get("by_executor")).items():
        found += schema_faults(as_object(rule), f"{name}.by_executor.{executor}")
    return found + schema_faults(config, f"{name}.config")


class TypeSheets:
    """The built-in types, and those that a user and a project add in their `types` folders."""

    def __init__(self, user: Path, project: Path) -> None:
        self._user = user
        self._project = project
        self._stamps: Stamps = ()
        self._sheets: TypeSpecs | None = None

    def now(self) -> TypeSpecs:
        """Return the current type specs; the same object as long as no file changes."""
        if self._sheets is None or not are_fresh(self._stamps):
            paths = [path for folder in (self._user, self._project) for path in _paths(str(folder))]
            self._stamps = tuple((path, settled(stamp_of(path))) for path in paths)
            self._sheets = load_type_specs(self._project, user=self._user)
        return self._sheets

    def files(self) -> Sequence[str]:
        """Return the paths that the current type specs depend on."""
        return [path for path, _ in self._stamps]


def _paths(folder: str) -> list[str]:
    try:
        names = sorted(os.listdir(folder))[:MAX_SHEETS]  # noqa: PTH208 - names, not paths
    except OSError:
        names = []
    return [folder, *(f"{folder}/{name}" for name in names)]
