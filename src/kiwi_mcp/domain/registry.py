"""Published versions: releases, their actors, their status, and the hashes that identify them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from kiwi_mcp.domain.json import JsonObject, as_object, canonical
from kiwi_mcp.domain.names import is_namespace
from kiwi_mcp.domain.patterns import lazy_pattern

Visibility = Literal["public", "unlisted", "private"]
"""Who sees an item: all users; all users who know its name; only members of its namespace."""

BUILTIN_NAMESPACE = "kiwi"
"""The namespace of the items that ship with Kiwi. Publishing to it is not possible."""

DEFAULT_NAMESPACE = "public"

ItemName: TypeAlias = tuple[str, str]
"""The namespace and the name of an item."""
_DIGEST = lazy_pattern(r"sha256:[0-9a-f]{64}", re.ASCII)
Op = Literal["publish", "yank", "unyank", "deprecate", "undeprecate", "visibility"]


def is_user_namespace(text: str) -> bool:
    """Whether a text can name a namespace that people publish to."""
    return is_namespace(text) and text != BUILTIN_NAMESPACE


class Actor(Struct, frozen=True):
    """The user of a registry: a name for the record, and the namespaces they belong to.

    Members see private items of a namespace and may publish to it. A short name is looked up in these namespaces, in
    this order, then among the items that ship with Kiwi, and nowhere else: an item of an unknown publisher never
    matches it.
    """

    name: str
    namespaces: tuple[str, ...] = (DEFAULT_NAMESPACE,)

    @property
    def order(self) -> tuple[str, ...]:
        """The namespaces in which short names are looked for."""
        return (*self.namespaces, *({BUILTIN_NAMESPACE} - {*self.namespaces}))

    def is_member(self, namespace: str) -> bool:
        """Whether the actor belongs to a namespace."""
        return namespace in self.namespaces


PUBLIC_ACTOR = Actor("anybody", ())
"""Belongs to no namespace, so it sees public items only and publishes nothing."""


class VersionName(Struct, frozen=True):
    """The name of one version within a registry, wherever it is kept."""

    namespace: str
    tool_id: str
    version: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.tool_id}@{self.version}"

    @property
    def item(self) -> ItemName:
        """The namespace and the name of the item."""
        return self.namespace, self.tool_id


class Pin(Struct, frozen=True):
    """What an executor was when a version was published: as authored, and exactly which version that meant."""

    ref: str
    name: VersionName
    digest: str

    @property
    def is_builtin(self) -> bool:
        """Whether it ships with Kiwi: then it is kept for the record, and every installation brings its own."""
        return self.name.namespace == BUILTIN_NAMESPACE


class StatusNote(Struct, frozen=True):
    """A status of a published version: when, and why."""

    at: str
    reason: str = ""


class ReleaseFile(Struct, frozen=True):
    """One file of a version: its path below the item's folder, and all of its bytes."""

    path: str
    data: bytes
    is_executable: bool = False

    @property
    def sha256(self) -> str:
        """The hash of the bytes, as 64 hexadecimal digits."""
        return sha256(self.data).hexdigest()


class Release(Struct, frozen=True):
    """One version of an item with everything it is made of."""

    name: VersionName
    place: str
    """Where the file with the manifest stands below an `.ai` folder: `tools/mail/enricher/tool.yaml`."""
    statement: bytes
    """The canonical JSON that the digest is the hash of, stored exactly as it was hashed."""
    manifest: JsonObject
    """The manifest in its one shape, for lists and searches; the files are what counts."""
    files: tuple[ReleaseFile, ...]
    """Every file, the one with the manifest among them, byte for byte."""
    executor: Pin | None = None
    changelog: str = ""
    visibility: Visibility = "public"
    published_by: str = ""
    created_at: str = ""
    """When it was first published, ISO 8601 in UTC with milliseconds; empty means now."""
    yanked: StatusNote | None = None
    deprecated: StatusNote | None = None
    is_official: bool = False
    is_builtin: bool = False
    references: tuple[Pin, ...] = ()
    """What each item that it names in its config was when it was published: a directive, a step, a skill."""

    @property
    def digest(self) -> str:
        """The digest of the item, `sha256:` and 64 hexadecimal digits."""
        return f"sha256:{sha256(self.statement).hexdigest()}"

    @property
    def manifest_path(self) -> str:
        """The path of the file with the manifest, below the item's folder."""
        return self.place.rpartition("/")[2]

    @property
    def sidecar_path(self) -> str:
        """The path of the file that may tell who signed the manifest; like a signature line, no digest counts it."""
        return f"{self.manifest_path}.sig"


class VersionInfo(Struct, frozen=True):
    """A version without its files."""

    id: str
    """The version's row in the store it was read from."""
    name: VersionName
    digest: str
    closure: str
    """One hash for the version, its executors and the items that it names, but for those that ship with Kiwi."""
    place: str
    tool_type: str
    title: str = ""
    description: str = ""
    category: str = ""
    tags: tuple[str, ...] = ()
    manifest_text: str = "{}"
    """The manifest as JSON, parsed on demand."""
    executor: Pin | None = None
    visibility: Visibility = "public"
    is_latest: bool = False
    is_official: bool = False
    is_builtin: bool = False
    changelog: str = ""
    published_by: str = ""
    created_at: str = ""
    yanked: StatusNote | None = None
    deprecated: StatusNote | None = None
    references: tuple[Pin, ...] = ()

    @property
    def manifest(self) -> JsonObject:
        """The manifest in its one shape."""
        return as_object(json.loads(self.manifest_text))


class ChainRow(NamedTuple):
    """One version in a chain, with only the fields that a store can return fast."""

    id: str
    namespace: str
    tool_id: str
    version: str
    digest: str
    closure: str
    place: str
    tool_type: str
    executor_ref: str | None
    manifest_text: str
    yanked_at: str | None
    deprecated_at: str | None
    references: str
    """The items that it names, as they are stored."""
    depth: int
    """The number of links from here to the end of the chain."""

    @property
    def name(self) -> VersionName:
        """The version's name."""
        return VersionName(self.namespace, self.tool_id, self.version)


class RegistryEvent(Struct, frozen=True):
    """One entry of a registry's log: what happened to which version. Replayed in order, events give the registry."""

    seq: int
    op: Op
    name: VersionName
    digest: str
    closure: str
    actor: str
    at: str
    reason: str = ""
    """Why, for a mark; the new visibility, for `visibility`."""
    visibility: Visibility = "public"
    """The visibility that the item has now."""
    hash: str = ""
    """The hash of the entry and all before it, which distinguishes two logs; a folder has none."""


class Cursor(NamedTuple):
    """A position in a log: the number of an entry, and its hash."""

    seq: int
    hash: str = ""


START = Cursor(0)
"""The cursor before the first entry."""


class PublishResult(Struct, frozen=True):
    """The result of publishing one version: its name and hashes, and whether it was new."""

    name: VersionName
    digest: str
    closure: str
    is_new: bool


def is_digest(text: str) -> bool:
    """Whether the text is a digest as Kiwi writes it, which is safe as a file name."""
    return _DIGEST.fullmatch(text) is not None


class Linked(Protocol):
    """A version and its executor."""

    @property
    def name(self) -> VersionName:
        """Its name."""

    @property
    def digest(self) -> str:
        """Its digest."""

    @property
    def executor(self) -> Pin | None:
        """The version of its executor, if any."""

    @property
    def references(self) -> tuple[Pin, ...]:
        """The versions of the items that it names."""


def pins_of(version: Linked) -> tuple[Pin, ...]:
    """Return all that a version depends on: its executor, and the items that it names."""
    return (*((version.executor,) if version.executor else ()), *version.references)


def is_same_content(known: Linked, new: Linked) -> bool:
    """Whether two versions have one digest, one executor and the same items that they name.

    Any release of an item that ships with Kiwi counts. A version from before references were recorded has none.
    """

    def content(version: Linked) -> tuple[object, ...]:
        named = version.references if known.references else ()
        return version.digest, _meant(version.executor), *((pin.ref, _meant(pin)) for pin in named)

    return content(known) == content(new)


def _meant(pin: Pin | None) -> object:
    return pin and (pin.name.tool_id if pin.is_builtin else (pin.name, pin.digest))


def closure_in(version: Linked, closures: Mapping[VersionName, str]) -> str:
    """Return the closure of a version, given those of what it depends on."""
    below = closure_of_pin(version.executor, closures) if version.executor else None
    named = sorted((pin.ref, closure_of_pin(pin, closures) or "-") for pin in version.references)
    return closure_of(version.digest, below, named)


def closure_of_pin(pin: Pin, closures: Mapping[VersionName, str]) -> str | None:
    """Return the part of a pin in a closure; of an item that ships with every Kiwi, that is only its name."""
    return f"{BUILTIN_NAMESPACE}/{pin.name.tool_id}" if pin.is_builtin else closures.get(pin.name)


def closure_of(digest: str, executor_closure: str | None, named: Iterable[tuple[str, str]] = ()) -> str:
    """Return the hash that names a version, its executors, and the items that it names, each with its closure."""
    statement = "\n".join([digest, executor_closure or "-", *(f"{closure} {ref}" for ref, closure in named)])
    return f"sha256:{sha256(statement.encode()).hexdigest()}"


def pins_to_json(pins: Iterable[Pin]) -> str:
    """Return pins as canonical JSON."""
    return canonical([[pin.ref, *pin.name.item, pin.name.version, pin.digest] for pin in pins]).decode()


def pins_from_json(text: str) -> tuple[Pin, ...]:
    """Return the pins in a text; one that cannot be read is empty, which the check finds."""
    try:
        rows = msgspec.json.decode(text, type=list[tuple[str, str, str, str, str]])
    except msgspec.DecodeError:
        return (Pin("", VersionName("", "", ""), ""),)
    return tuple(Pin(ref, VersionName(*name), digest) for ref, *name, digest in rows)
