"""What every request carries besides its own parameters: in the new era who asks in which revision, and headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
    mcp_param_headers,
    x_mcp_header_map,
)
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    Implementation,
)

from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.drivers.mcp.eras import Era


@dataclass(frozen=True, slots=True)
class Stamp:
    """The marks of one conversation."""

    version: str = ""
    meta: Mapping[str, Json] = field(default_factory=dict)

    @classmethod
    def of(cls, era: Era, version: str, client: Implementation) -> Stamp:
        """Return the marks that a revision wants."""
        if era == "legacy":
            return cls(version)
        who = client.model_dump(by_alias=True, mode="json", exclude_none=True)
        return cls(
            version,
            {PROTOCOL_VERSION_META_KEY: version, CLIENT_INFO_META_KEY: who, CLIENT_CAPABILITIES_META_KEY: {}},
        )

    def params(self, params: JsonObject) -> JsonObject:
        """Return the parameters of a request with the marks on them."""
        return {**params, "_meta": {**as_object(params.get("_meta")), **self.meta}} if self.meta else params

    def headers(self, method: str, params: JsonObject, schema: Json = None) -> dict[str, str]:
        """Return the headers of a request; a transport without headers leaves them out."""
        found = {MCP_PROTOCOL_VERSION_HEADER: self.version}
        if not self.meta:
            return found
        found[MCP_METHOD_HEADER] = method
        if name := as_text(params.get(NAME_BEARING_METHODS.get(method, ""))):
            found[MCP_NAME_HEADER] = encode_header_value(name)
        if isinstance(schema, Mapping):
            found |= mcp_param_headers(x_mcp_header_map(schema), as_object(params.get("arguments")))
        return found
