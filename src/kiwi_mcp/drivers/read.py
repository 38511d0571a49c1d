"""The read driver: directives and knowledge; to execute one is to read it."""

from __future__ import annotations

from collections.abc import Mapping

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import NotCallable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool, ToolFile
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan, ReadSpec
from kiwi_mcp.manifest.directive import program
from kiwi_mcp.manifest.knowledge import body, links
from kiwi_mcp.manifest.permissions import grant_of

_CONTENT_NAMES = ("directive.md", "content.md", "README.md")
"""The file names of an item's text, next to its manifest."""


class Read:
    """Returns an item's text: a directive as a program for the caller's own model, knowledge unchanged."""

    async def check(self, chain: Chain, space: Space) -> tuple[Issue, ...]:
        """Find nothing: what is read was read when its manifest was."""
        return ()

    async def aclose(self) -> None:
        """Release nothing: nothing is kept between calls."""

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Plan to read the one file that holds the item's text."""
        tool = chain.tool
        file = _text_file(tool)
        return Plan(
            identity=tool.identity,
            tool_digest=tool.digest,
            driver="read",
            chain=tuple((link.identity, link.digest) for link in chain.links),
            spec=ReadSpec(path=file.path, sha256=file.sha256),
            inputs=inputs,
            effect="pure",
        )

    async def prepare(self, plan: Plan, chain: Chain, space: Space) -> None:
        """Check nothing: no process is started."""

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller
    ) -> Outcome:
        """Read the file and give it in the form its reader needs."""
        text = load_bytes(chain.tool, _text_file(chain.tool)).decode("utf-8", errors="replace")
        if chain.tool.manifest.executor:  # a directive has an executor that could run it; knowledge has none
            ready = {**program(text), "provided_inputs": plan.inputs, "integrity": chain.tool.integrity}
            ready["input_schema"] = chain.tool.manifest.parameters
            ready["permissions"] = grant_of(chain.tool.manifest.config.get("permissions"), chain.tool.id).to_json()
            return Outcome(status="ready", result=ready)
        return Outcome(status="success", result={"content": body(text), "links": list(links(text))})


def _text_file(tool: Tool) -> ToolFile:
    by_name = {file.path: file for file in tool.files}
    for name in (tool.entrypoint, *_CONTENT_NAMES, tool.origin.path.name):
        if name in by_name and name.endswith(".md"):
            return by_name[name]
    markdown = [file for file in tool.files if file.path.endswith(".md")]
    if not markdown:
        raise NotCallable(tool.id, tool.manifest.tool_type, "it has no Markdown file beside its manifest to read")
    return markdown[0]


create_driver = Read
