"""What only the owner decides: which registries there are, and so where versions and tokens go; and MCP servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kiwi_mcp.catalog.folder import MANIFESTS
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.kernel.authoring.drafts import contents
from kiwi_mcp.kernel.requests import ExecuteRequest, RegistryRequest, Request
from kiwi_mcp.kernel.settings import RegistrySettings
from kiwi_mcp.manifest.placement import read_written

_SERVER = "mcp_server"
_SUFFIXES = (".yaml", ".toml", ".md", ".py", ".js", ".sh")
_WORDS = {"publish": "to", "pull": "from"}
"""The word of each action that names a remote."""


def refuse_strangers(request: Request, settings: RegistrySettings) -> None:
    """Refuse a request that is not from the owner's hand and names a remote, or a server, that the owner did not."""
    match request:
        case RegistryRequest(action="add"):
            raise PolicyDenied(
                "Only the owner says which registries there are.",
                suggestion="Ask the owner to type `kiwi registry add NAME URL`.",
            )
        case RegistryRequest(remote=str(address)):
            _demand_known(address, settings)
        case ExecuteRequest(action="create" | "update"):
            _refuse_servers(request)
        case ExecuteRequest(action=action, parameters=words) if isinstance(words.get(_WORDS.get(action, "")), str):
            _demand_known(str(words[_WORDS[action]]), settings)


def _refuse_servers(request: ExecuteRequest) -> None:
    """Refuse to write the manifest of an MCP server, whichever way it is sent."""
    if _SERVER in _types(as_object(request.parameters)):  # type: ignore[arg-type]  # JSON came in, so JSON it is
        raise PolicyDenied(
            "Only the owner says which MCP servers there are, and what starts them.",
            suggestion="Ask the owner to type `kiwi mcp add NAME -- COMMAND`.",
        )


def _types(words: JsonObject) -> Iterator[Json]:
    """Give the types that the words of a change name; what cannot be read is refused where it is written."""
    yield words.get("tool_type")
    yield as_object(words.get("manifest")).get("tool_type")
    files = as_object(words.get("files"))
    sent = {"content": words.get("content"), **{name: files[name] for name in MANIFESTS & files.keys()}}
    for name, text in sent.items():
        # An update says nothing of the kind of file that a text is for, so each kind is tried.
        for suffix in _SUFFIXES if text is not None else ():
            with suppress(KiwiError):
                written = read_written(Path(f"item{suffix}"), contents({name: text})[name].decode(errors="replace"))
                yield written.value.get("tool_type") if written else None


def _demand_known(address: str, settings: RegistrySettings) -> None:
    if address not in settings.remotes:
        known = ", ".join(settings.remotes) or "none yet"
        raise PolicyDenied(
            "Only registries that the owner named can be asked, or sent anything.",
            suggestion=f"Name one of these: {known}; or ask the owner to type `kiwi registry add NAME URL`.",
        )
