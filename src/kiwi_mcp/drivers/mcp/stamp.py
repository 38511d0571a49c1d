"""What every request carries besides its own parameters: in the new era who asks in which revision, and headers.

In the new era each request says anew what may be asked of whoever waits for it, and whether they hear of log lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
    find_invalid_x_mcp_header,
    mcp_param_headers,
    x_mcp_header_map,
)
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    LOG_LEVEL_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    Implementation,
)

from kiwi_mcp.domain.caller import NOBODY, Caller, unheard
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.drivers.mcp.eras import Era
from kiwi_mcp.drivers.mcp.talk import NOTE_LEVEL

TASKS: Final = "io.modelcontextprotocol/tasks"
"""The extension by which a call goes on as a task at its server."""
_NAMED_BY: Final[Mapping[str, str]] = {
    **NAME_BEARING_METHODS,
    **dict.fromkeys(("tasks/get", "tasks/update", "tasks/cancel"), "taskId"),
}
"""The parameter of a request that is its name in a header."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The marks of one conversation."""

    version: str = ""
    meta: Mapping[str, Json] = field(default_factory=dict)

    @classmethod
    def of(cls, era: Era, version: str, client: Implementation, offered: JsonObject) -> Stamp:
        """Return the marks that a revision wants; `offered` are the server's capabilities."""
        if era == "legacy":
            return cls(version)
        who = client.model_dump(by_alias=True, mode="json", exclude_none=True)
        ours: JsonObject = {"extensions": {TASKS: {}}} if TASKS in as_object(offered.get("extensions")) else {}
        return cls(
            version,
            {PROTOCOL_VERSION_META_KEY: version, CLIENT_INFO_META_KEY: who, CLIENT_CAPABILITIES_META_KEY: ours},
        )

    @property
    def has_tasks(self) -> bool:
        """Whether the extension of tasks is among the marks."""
        return TASKS in as_object(as_object(self.meta.get(CLIENT_CAPABILITIES_META_KEY)).get("extensions"))

    def params(self, params: JsonObject, caller: Caller = NOBODY) -> JsonObject:
        """Return the parameters of a request with the marks on them."""
        if not self.meta:
            return params
        meta = {**as_object(params.get("_meta")), **self.meta}
        if caller.capabilities:
            ours = as_object(meta[CLIENT_CAPABILITIES_META_KEY])
            meta[CLIENT_CAPABILITIES_META_KEY] = {**ours, **caller.capabilities}
        if caller.note is not unheard:
            meta[LOG_LEVEL_META_KEY] = NOTE_LEVEL
        return {**params, "_meta": meta}

    def headers(self, method: str, params: JsonObject, schema: Json = None) -> dict[str, str]:
        """Return the headers of a request; a transport without headers leaves them out."""
        found = {MCP_PROTOCOL_VERSION_HEADER: self.version}
        if not self.meta:
            return found
        found[MCP_METHOD_HEADER] = method
        if name := as_text(params.get(_NAMED_BY.get(method, ""))):
            found[MCP_NAME_HEADER] = encode_header_value(name)
        # Which words may be names of headers only a sound schema tells.
        if isinstance(schema, Mapping) and find_invalid_x_mcp_header(schema) is None:
            found |= mcp_param_headers(x_mcp_header_map(schema), as_object(params.get("arguments")))
        return found
