"""Asking: which plans wait for the owner's word, and which of the owner's rules is a word already given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from kiwi_mcp.domain.approval import ApprovalRule, Touched
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.globs import fits_host, fits_item, fits_path
from kiwi_mcp.domain.json import as_list, as_object, text_of
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec, ReadSpec

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_LAX = frozenset({"trusted", "standard"})
"""The levels that keep a process from nothing that the owner could change."""
_NOTHING = Touched()
_OF_PROJECT = "project/"
_STRANGE = frozenset({"unknown", "known_publisher", "mcp_server"})
ANYWHERE = "/"


def touched(plan: Plan, chain: Chain) -> Touched:
    """Return what a plan may change of the owner's, and where it may send data."""
    if isinstance(plan.spec, HttpSpec):
        return Touched(sends=(_host(plan.spec),)) if _sends(plan, plan.spec, chain) else _NOTHING
    if isinstance(plan.spec, ReadSpec) or _only_reads(plan, chain):
        return _NOTHING
    if plan.jail is not None and plan.jail.level not in _LAX:
        return Touched(plan.jail.writable, plan.jail.hosts)
    # Nothing keeps it to what it asks for, so that its own word has to do.
    is_changing = chain.tool.manifest.mutates_state or bool(chain.needs.write)
    return Touched((ANYWHERE,) if is_changing else (), chain.needs.hosts)


def is_from_outside(plan: Plan) -> bool:
    """Whether what a plan gives is words of others: of a server, of the network, or of code that nobody vouches for."""
    if isinstance(plan.spec, HttpSpec) or plan.driver == "mcp":
        return True
    return plan.jail is not None and (bool(plan.jail.hosts) or plan.jail.provenance in _STRANGE)


def is_carrying(touches: Touched) -> bool:
    """Whether a plan may both change the owner's files and send data out."""
    return bool(touches.writes and touches.sends)


def installed(plan: Plan) -> tuple[str, ...]:
    """Return the packages that are installed for a plan."""
    return tuple(map(text_of, as_list(as_object(plan.facts.get("environment")).get("packages"))))


def reasons(
    touches: Touched, first_runs: Sequence[str], *, is_tainted: bool = False, packages: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return why the owner is asked, a phrase each; nothing where nobody has to be."""
    told: list[str] = []
    if is_tainted:
        told.append("was called after words from outside were read")
    if first_runs:
        told.append("runs for the first time what a model wrote")
        if packages:
            told.append(f"installs packages for that: {', '.join(packages)}")
    if ANYWHERE in touches.writes:
        told.append("changes things, and is not held in a sandbox")
    if paths := [path for path in touches.writes if path != ANYWHERE]:
        told.append(f"may change {', '.join(paths)}")
    if touches.sends:
        told.append(f"may send data to {', '.join(touches.sends)}")
    return tuple(told)


def covering(
    rules: Iterable[ApprovalRule], plan: Plan, touches: Touched, *, actor: str, project: str, content: str, now: int
) -> ApprovalRule | None:
    """Return a rule that says yes to a plan in a project already, for the content it has, at a time in milliseconds."""
    holding = (rule for rule in rules if _holds(rule, actor, project, content, now))
    return next((rule for rule in holding if _covers(rule, plan, touches)), None)


def is_of_project(item: str) -> bool:
    """Whether a name, or a pattern of names, is about items of a project: they are other ones in each."""
    return item.startswith(_OF_PROJECT)


def _holds(rule: ApprovalRule, actor: str, project: str, content: str, now: int) -> bool:
    return (
        (rule.expires_at is None or now < rule.expires_at)
        and rule.actor in {"", actor}
        and rule.digest in {"", content}
        and (rule.project == project or not (rule.project or is_of_project(rule.item)))
    )


def _covers(rule: ApprovalRule, plan: Plan, touches: Touched) -> bool:
    return (
        fits_item(rule.item, plan.identity)
        and _begins(rule.argv, plan)
        and (not (rule.paths or rule.hosts or rule.digest) or _is_within(rule, touches))
    )


def _begins(argv: tuple[str, ...], plan: Plan) -> bool:
    return not argv or (isinstance(plan.spec, ProcessSpec) and plan.spec.argv[: len(argv)] == argv)


def _is_within(rule: ApprovalRule, touches: Touched) -> bool:
    """Whether a rule that names paths or hosts names all that is touched."""
    return all(any(fits_path(glob, path) for glob in rule.paths) for path in touches.writes) and all(
        any(fits_host(glob, host) for glob in rule.hosts) for host in touches.sends
    )


def _sends(plan: Plan, spec: HttpSpec, chain: Chain) -> bool:
    if plan.driver == "mcp":
        return not _only_reads(plan, chain)
    return spec.method.upper() not in _SAFE_METHODS or spec.stream == "websocket"


def _only_reads(plan: Plan, chain: Chain) -> bool:
    """Whether a plan asks an MCP server for nothing but a text, or for a tool that was accepted as one that reads."""
    if plan.driver != "mcp":
        return False
    if as_object(plan.facts.get("mcp")).get("method") != "tools/call":
        return True
    # What an item in a folder says of a server's tool was accepted by nobody.
    return chain.tool.origin.source == "mcp" and not chain.tool.manifest.mutates_state


def _host(spec: HttpSpec) -> str:
    return urlsplit(spec.url).netloc.rpartition("@")[2] or spec.url
