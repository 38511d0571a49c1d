"""From an item of a server and a caller's parameters to one request."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias
from urllib.parse import quote

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import InvalidArguments
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, text_of
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.drivers.mcp.server import server_of
from kiwi_mcp.drivers.words import seconds

Method: TypeAlias = Literal["tools/call", "prompts/get", "resources/read"]

# Of the templates that resources may have, the forms that stand for one value: `{name}`, and `{+name}` as it is.
_EXPRESSION = re.compile(r"\{(\+?)([A-Za-z0-9_.]+)\*?\}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request that a server is asked: its method, and what of the server it is about."""

    method: Method
    name: str

    def params(self, inputs: JsonObject) -> dict[str, Json]:
        """Return the request's parameters for a caller's inputs."""
        match self.method:
            case "tools/call":
                return {"name": self.name, "arguments": dict(inputs)}
            case "prompts/get":
                return {"name": self.name, "arguments": {name: text_of(value) for name, value in inputs.items()}}
            case "resources/read":
                return {"uri": self.name}


def bind_mcp(chain: Chain, inputs: JsonObject, space: Space) -> Plan:
    """Return the plan of an item of a server: how the server is reached, and what it is asked."""
    tool, server = chain.tool, server_of(chain.executor, space)
    wanted = wanted_of(chain, inputs)
    spec = replace(server.spec, timeout=seconds(tool.manifest.config.get("timeout"), server.spec.timeout))
    return Plan(
        identity=tool.identity,
        tool_digest=tool.digest,
        driver="mcp",
        chain=tuple((link.identity, link.digest) for link in chain.links),
        spec=spec,
        inputs=inputs,
        variables=server.variables,
        defaulted=server.defaulted,
        facts={"mcp": {"method": wanted.method, "name": wanted.name, "transport": server.transport}},
        effect=tool.manifest.effect or ("at_most_once" if wanted.method == "tools/call" else "idempotent"),
        warnings=server.warnings,
    )


def wanted_of(chain: Chain, inputs: JsonObject) -> Wanted:
    """Return what an item asks of its server."""
    config = chain.tool.manifest.config
    if uri := as_text(config.get("mcp_resource_uri")):
        return Wanted("resources/read", _expanded(chain.tool.id, uri, inputs))
    if prompt := as_text(config.get("mcp_prompt_name")):
        return Wanted("prompts/get", prompt)
    return Wanted("tools/call", as_text(config.get("mcp_tool_name")))


def planned(plan: Plan) -> Wanted:
    """Return what a plan asks of its server."""
    facts = as_object(plan.facts.get("mcp"))
    match facts.get("method"):
        case "prompts/get" | "resources/read" as method:
            return Wanted(method, as_text(facts.get("name")))
        case _:
            return Wanted("tools/call", as_text(facts.get("name")))


def _expanded(tool_id: str, template: str, inputs: JsonObject) -> str:
    missing = [name for _, name in _EXPRESSION.findall(template) if name not in inputs]
    if missing:
        fix = "Send it: the resource's address is made with it."
        raise InvalidArguments(tool_id, [Issue(name, "is missing", fix) for name in missing])
    return _EXPRESSION.sub(
        lambda found: quote(text_of(inputs[found[2]]), safe=":/?#[]@!$&'()*+,;=" if found[1] else ""), template
    )
