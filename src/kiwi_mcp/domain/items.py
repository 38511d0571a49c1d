"""Items: what an author writes, and the same with a home."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, text_of
from kiwi_mcp.domain.needs import Needs

Source = Literal["project", "user", "registry", "mcp", "builtin"]
"""Where an item was found, in the order in which short names resolve."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an author wrote, in the one shape every placement and spelling is read into.

    `tool_type`, `executor`, `config` and `parameters` are canonical (old spellings resolved, parameters always a
    JSON Schema object); `written` holds the mapping exactly as it was authored.
    """

    tool_id: str
    tool_type: str
    version: str
    executor: str | None = None
    name: str = ""
    description: str = ""
    category: str = ""
    tags: tuple[str, ...] = ()
    config: JsonObject = field(default_factory=dict)
    parameters: JsonObject = field(default_factory=dict)
    outputs: JsonObject = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    mutates_state: bool = False
    effect: str = ""
    validation: JsonObject = field(default_factory=dict)
    env_config: JsonObject = field(default_factory=dict)
    extra: JsonObject = field(default_factory=dict)
    written: JsonObject = field(default_factory=dict)
    issues: tuple[Issue, ...] = ()

    @property
    def executor_id(self) -> str | None:
        """The executor's short name, without the namespace and the version that may be asked for."""
        return self.executor.partition("@")[0].rpartition("/")[2] if self.executor else None

    @property
    def isolation(self) -> str | None:
        """How strictly its process is to be held at least, as it was written; None where it does not say."""
        return text_of(self.extra["isolation"]) if "isolation" in self.extra else None

    @property
    def needs(self) -> Needs:
        """What of the owner's it asks for."""
        return Needs.from_json(self.extra.get("needs"))

    @property
    def written_type(self) -> str:
        """The type as the author spelled it."""
        word = self.written.get("tool_type")
        return word if isinstance(word, str) else self.tool_type


@dataclass(frozen=True, slots=True)
class ToolFile:
    """One file of an item: its path below the item's root, and the hash of its bytes."""

    path: str
    sha256: str
    size: int
    is_executable: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """The first line of a signed item: when, which hash, and by which scheme it was written."""

    timestamp: str
    hash: str
    scheme: Literal["kiwi", "rye"] = "kiwi"
    key: str = ""
    """The public key of whoever signed, where the line says more than a hash."""
    proof: str = ""
    """The signature itself, by that key."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an item lives: its source, the file its manifest is in, and the folder its files are below.

    `base` is the folder that its source begins with, an `.ai` folder for most.
    """

    source: Source
    path: Path
    root: Path
    namespace: str = "local"
    base: Path = Path()

    @property
    def is_folder(self) -> bool:
        """Whether the item is a folder with a manifest in it, not a single file."""
        return self.path.name in {"tool.yaml", "tool.yml", "tool.json"}

    @property
    def place(self) -> str:
        """Where the file with the manifest stands below the base: `tools/mail/enricher/tool.yaml`."""
        return self.path.relative_to(self.base).as_posix()


@dataclass(frozen=True, slots=True)
class Tool:
    """A manifest that has a home: its files, its origin, its digest and its signature line."""

    manifest: Manifest
    origin: Origin
    files: tuple[ToolFile, ...] = ()
    digest: str = ""
    signature: Signature | None = None
    integrity: str = "unsigned"
    """`unsigned`, `signed`, `builtin`, `published`, `valid:<gen>` for an old hash, `modified`,
    `legacy-unverifiable`. What a registry sealed is `published` where it bears no signature of its own. What an MCP
    server offers is `accepted`, `changed` since it was, or `new`."""
    trust: str = ""
    """Who vouches for it: `verified` (a publisher whose key the owner trusts), `owner` (the owner's own key),
    `integrity` (a hash, so nobody), `unsigned`, `tampered`, `revoked`, `unknown_key`. Empty for what is not signed by
    its nature: what ships with Kiwi, and what an MCP server offers."""
    signer: str = ""
    """The fingerprint of the key that it is signed with, where it is signed with one."""

    @property
    def id(self) -> str:
        """The short name."""
        return self.manifest.tool_id

    @property
    def identity(self) -> str:
        """The full name: `source/namespace/name@version`."""
        return f"{self.origin.source}/{self.origin.namespace}/{self.id}@{self.manifest.version}"

    @property
    def entrypoint(self) -> str:
        """The path of the file to run, below the root; empty for an item without one."""
        named = self.manifest.config.get("entrypoint")
        return named if isinstance(named, str) else ""
