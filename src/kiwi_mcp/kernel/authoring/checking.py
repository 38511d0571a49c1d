"""Checking an item as its author would want it: every issue at once, syntax by the runtime's own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.read import load_bytes
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import InvalidManifest, KiwiError
from kiwi_mcp.domain.grants import Deny, Rights
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.kernel.pipeline import load_driver
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.placement import read_written
from kiwi_mcp.policy.authority import rights_of


@dataclass(frozen=True, slots=True)
class Verdict:
    """What checking found: errors keep the item from being used, warnings do not."""

    issues: tuple[Issue, ...]
    tool_type: str = ""
    digest: str = ""
    """The digest of the item, as it was checked."""

    @property
    def errors(self) -> tuple[Issue, ...]:
        """The issues that keep the item from being used."""
        return tuple(issue for issue in self.issues if issue.is_error)

    @property
    def warnings(self) -> tuple[Issue, ...]:
        """The issues that an author should know of."""
        return tuple(issue for issue in self.issues if not issue.is_error)

    def with_issue(self, issue: Issue) -> Verdict:
        """Return the verdict with one issue more."""
        return replace(self, issues=(*self.issues, issue))

    def demand(self, what: str) -> None:
        """Refuse the item if it has errors."""
        if self.errors:
            raise InvalidManifest(what, self.errors)


async def examine(tool: Tool, catalog: Catalog) -> Verdict:
    """Return all that is wrong with an item: its manifest, its files, its chain and its syntax."""
    below, missing = _executor(tool, catalog)
    issues = list(
        check(
            tool.manifest,
            sheets=catalog.sheets,
            file_names=[file.path for file in tool.files],
            is_folder=tool.origin.is_folder,
            executor=below.tool.manifest if below else None,
            executor_missing=missing is not None,
            lines=_lines(tool),
        )
    )
    sheet = catalog.sheets.get(tool.manifest.tool_type)
    if missing is not None:
        issues = [_with_guess(issue, tool, catalog) for issue in issues]
    if missing is not None and sheet is not None and not any(issue.place == "executor" for issue in issues):
        issues.append(Issue("executor", missing.message, missing.suggestion))
    driver = load_driver(sheet.driver) if sheet else None
    if driver and sheet and not any(issue.is_error for issue in issues):
        chain = Chain((tool, *below.links) if below else (tool,), sheet.driver)
        refused = _refusal(chain, rights_of(catalog.space.user))
        issues += [refused] if refused else await driver.check(chain, catalog.space)
    return Verdict(tuple(issues), tool.manifest.tool_type, tool.digest)


def _with_guess(issue: Issue, tool: Tool, catalog: Catalog) -> Issue:
    """Return the issue of a missing executor with the name that was perhaps meant."""
    near = catalog.near(tool.manifest.executor_id or "")
    if issue.place != "executor" or not near:
        return issue
    return replace(issue, fix=f"Did you mean `{near[0]}`? {issue.fix}")


def _refusal(chain: Chain, rights: Rights) -> Issue | None:
    """Return why the driver is not asked: its check may start a program, so what keeps a call back keeps it back."""
    for link in chain.links[1:]:
        if link.integrity == "modified":
            fix = f"Look at what changed, then sign {link.id!r} again."
            return Issue("executor", f"{link.id!r} was changed after it was signed", fix)
    if isinstance(rights.item_verdict([link.identity for link in chain.links]), Deny):
        reason = "the syntax was not checked, since the owner's policy does not let the item run"
        return Issue("", reason, "Ask the owner.", severity="warning")
    return None


def _lines(tool: Tool) -> Mapping[str, int]:
    """Return the line of each place in the manifest, where its format tells."""
    by_name = {file.path: file for file in tool.files}
    text = load_bytes(tool, by_name[tool.origin.path.name]).decode("utf-8", errors="replace")
    written = read_written(tool.origin.path, text)
    return written.lines if written else {}


def _executor(tool: Tool, catalog: Catalog) -> tuple[Chain | None, KiwiError | None]:
    if not tool.manifest.executor:
        return None, None
    try:
        return catalog.below(tool), None
    except KiwiError as error:
        return None, error
