"""The read driver: directives and knowledge; to execute one is to read it."""

from __future__ import annotations

from collections.abc import Mapping

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.catalog.references import loader, text_file, text_item
from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan, ReadSpec
from kiwi_mcp.drivers.driver import Dispatch
from kiwi_mcp.manifest.knowledge import body, links
from kiwi_mcp.manifest.program import checked_inputs, directive_program, folder_issues, undeclared


class Read:
    """Returns an item's text: a directive as a program for the caller's own model, knowledge unchanged."""

    def check(self, chain: Chain, space: Space) -> None:
        """Report where the text of a directive in a folder says other than its manifest, or names unknown inputs."""
        tool = chain.tool
        if not tool.manifest.executor:
            return
        file, text = text_file(tool).path, text_item(tool).text
        issues = list(folder_issues(tool.manifest, text, file)) if tool.origin.is_folder else []
        for name in undeclared(text, tool.manifest.parameters) if not tool.manifest.config.get("extends") else ():
            fix = f"Declare an input `{name}`, or write `{{input:{name}?}}`."
            issues.append(Issue("process", f"`{{input:{name}}}` is not an input", fix, "warning"))
        if issues:
            raise InvalidManifest(tool.id, issues)

    async def aclose(self) -> None:
        """Release nothing: nothing is kept between calls."""

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Plan to read the one file that holds the item's text."""
        tool = chain.tool
        file = text_file(tool)
        if tool.manifest.executor:
            checked_inputs(tool.id, tool.manifest.parameters, inputs)
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
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: Dispatch
    ) -> Outcome:
        """Read the file and give it in the form its reader needs."""
        if chain.tool.manifest.executor:  # a directive has an executor that could run it; knowledge has none
            program = directive_program(text_item(chain.tool), plan.inputs, loader(chain.references))
            return Outcome(status="ready", result={**program.to_json(), "integrity": chain.tool.integrity})
        text = load_bytes(chain.tool, text_file(chain.tool)).decode("utf-8", errors="replace")
        return Outcome(status="success", result={"content": body(text), "links": list(links(text))})


create_driver = Read
