"""The read driver: directives, knowledge and skills; to execute one is to read it."""

from __future__ import annotations

from collections.abc import Mapping

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.catalog.references import loader, text_file, text_item
from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import InvalidArguments, InvalidManifest, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool, ToolFile
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import Plan, ReadSpec
from kiwi_mcp.drivers import Dispatch, Driver
from kiwi_mcp.manifest.markdown import body, links, text_faults
from kiwi_mcp.manifest.program import checked_inputs, directive_program, folder_issues, undeclared

_LARGEST_FILE = 1_000_000
_MOST_NAMED = 50


class Read(Driver):
    """Returns an item's text: a directive as a program for the caller's own model, knowledge unchanged."""

    def check(self, chain: Chain, space: Space) -> None:
        """Report where the text of a directive in a folder says other than its manifest, or names unknown inputs."""
        tool = chain.tool
        if not tool.manifest.executor:
            written = load_bytes(tool, text_file(tool)).decode("utf-8", errors="replace")
            if found := [*text_faults(written, tool.manifest.config, what=tool.id)] if not _is_skill(chain) else []:
                raise InvalidManifest(tool.id, found)
            return
        file, text = text_file(tool).path, text_item(tool).text
        issues = list(folder_issues(tool.manifest, text, file)) if tool.origin.is_folder else []
        for name in undeclared(text, tool.manifest.parameters) if not tool.manifest.config.get("extends") else ():
            fix = f"Declare an input `{name}`, or write `{{input:{name}?}}`."
            issues.append(Issue("process", f"`{{input:{name}}}` is not an input", fix, "warning"))
        if issues:
            raise InvalidManifest(tool.id, issues)

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Plan to read the one file that holds the item's text."""
        tool = chain.tool
        file = _asked_file(tool, as_text(inputs.get("file"))) if _is_skill(chain) else text_file(tool)
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
        if _is_skill(chain):
            return Outcome(status="success", result=_skill(chain.tool, as_text(plan.inputs.get("file"))))
        text = load_bytes(chain.tool, text_file(chain.tool)).decode("utf-8", errors="replace")
        return Outcome(status="success", result={"content": body(text), "links": list(links(text))})


def _is_skill(chain: Chain) -> bool:
    """Whether an item gives instructions and has no executor that could run it."""
    return chain.traits[0].result_kind == "instructions" and not chain.tool.manifest.executor


def _asked_file(tool: Tool, path: str) -> ToolFile:
    """Return a file of a skill, or the one with its text; only a file that was found with the skill is one of it."""
    if not path:
        return text_file(tool)
    found = next((file for file in tool.files if file.path == path), None)
    if found is None:
        listed = ", ".join(file.path for file in tool.files[:_MOST_NAMED])
        raise InvalidArguments(tool.id, [Issue("file", f"{path!r:.200} is no file of it", f"Its files are: {listed}.")])
    if found.size > _LARGEST_FILE:
        raise TooLarge(f"{path!r:.200}", size=found.size, limit=_LARGEST_FILE)
    return found


def _skill(tool: Tool, path: str) -> JsonObject:
    """Return a skill with the names of its files, or one of its files."""
    data = load_bytes(tool, _asked_file(tool, path))
    if not path:
        return {
            "name": tool.id,
            "description": tool.manifest.description,
            "text": body(data.decode("utf-8", errors="replace")),
            "files": [file.path for file in tool.files if file.path != tool.origin.path.name],
        }
    try:
        return {"file": path, "text": data.decode()}
    except UnicodeDecodeError as error:
        fix = f"`kiwi skill export {tool.id} FOLDER` copies it."
        raise InvalidArguments(tool.id, [Issue("file", f"{path!r:.200} is not text", fix)]) from error


create_driver = Read
