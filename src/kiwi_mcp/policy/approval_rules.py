"""Why the owner is asked; which rule answers. The gate itself, its question and its verb stay in kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from kiwi_mcp.domain.grants import fits_host, fits_item, fits_path
from kiwi_mcp.domain.isolation import Provenance
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import as_list, as_object, text_of
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec, ReadSpec
from kiwi_mcp.domain.records import ApprovalRule, Effects

_LAX = frozenset({"trusted", "standard"})
"""The levels that keep a process from nothing that the owner could change."""
_NOTHING = Effects()

_FIRST_RUN: Mapping[Provenance, str] = {
    "model_written": "a model wrote",
    "unknown": "nobody is known to have signed",
    "known_publisher": "a publisher wrote",
}
"""The origins of content that waits for the owner before its first run, in words."""
ANYWHERE = "/"


def effects_of(plan: Plan, chain: Chain) -> Effects:
    """Return which of the owner's files a plan may change, and where it may send data."""
    if isinstance(spec := plan.spec, HttpSpec):
        # A variable in a request sends the owner's data out, with any method.
        is_changing = spec.method.upper() not in {"GET", "HEAD", "OPTIONS"} or spec.stream == "websocket"
        sends = not plan.only_reads if chain.server else is_changing or bool(plan.variables)
        host = urlsplit(spec.url).netloc.rpartition("@")[2] or spec.url
        return Effects(sends=(host,)) if sends else _NOTHING
    if isinstance(plan.spec, ReadSpec) or plan.only_reads:
        return _NOTHING
    if change := plan.change:
        return Effects(writes=(change.path,))
    if plan.profile is not None and plan.profile.level not in _LAX:
        # A script that needs git can move and delete branches besides, which the owner should read.
        has_git = chain.server is None and "git" in chain.needs.commands
        repositories = [f"{path}/.git" for path in plan.profile.writable] if has_git else []
        return Effects((*plan.profile.writable, *repositories), plan.profile.hosts)
    # Nothing keeps it to what it asks for, so that its own word has to do.
    is_changing = chain.tool.manifest.mutates_state or bool(chain.needs.write)
    return Effects((ANYWHERE,) if is_changing else (), chain.needs.hosts)


def effect_of(plan: Plan, chain: Chain) -> str:
    """Return the effect that decides whether a call may run again after its process died.

    A process that ends with its call, and whose sandbox lets it change and reach nothing, may.
    """
    profile = plan.profile
    is_closed = profile is not None and profile.level not in _LAX and not (profile.writable or profile.hosts)
    if is_closed and chain.server is None and not chain.tool.manifest.effect:
        return "pure"
    return plan.effect


def hinted_effect(plan: Plan, chain: Chain, *, is_accepted: bool) -> str:
    """Return the effect of a server's tool, by the hints of its accepted definition.

    They count where the server's sandbox lets it change and reach nothing, or where the owner trusts them.
    """
    tool, server, profile = chain.tool, chain.executor, plan.profile
    is_closed = profile is not None and profile.level not in _LAX and not (profile.writable or profile.hosts)
    is_trusted = is_accepted and server.manifest.config.get("trust_hints") is True
    if tool.manifest.effect or tool.integrity != "accepted" or not (is_closed or is_trusted):
        return plan.effect
    hints = as_object(tool.manifest.extra.get("annotations"))
    if hints.get("readOnlyHint") is True:
        return "pure"
    return "idempotent" if hints.get("idempotentHint") is True else plan.effect


def returns_untrusted_text(plan: Plan, chain: Chain) -> bool:
    """Whether the output of a plan is untrusted text: from a server, the network, or code without a trusted signer."""
    if isinstance(plan.spec, HttpSpec) or chain.traits[0].defined_by == "server":
        return True
    profile = plan.profile
    strange = {"unknown", "known_publisher", "mcp_server"}
    return profile is not None and (bool(profile.hosts) or profile.provenance in strange)


def installed(plan: Plan) -> tuple[str, ...]:
    """Return the packages that are installed for a plan."""
    return tuple(map(text_of, as_list(as_object(plan.facts.get("environment")).get("packages"))))


def waits_first(origin: Provenance, touches: Effects) -> bool:
    """Whether content of an origin waits for the owner before its first run, in a plan that touches this."""
    return origin == "model_written" or (bool(touches.sends) and origin in _FIRST_RUN)


def reasons(
    touches: Effects, first_runs: Collection[Provenance], *, is_tainted: bool = False, packages: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return why the owner is asked, a phrase each; `first_runs` are origins of content that never ran here."""
    response: list[str] = []
    if is_tainted:
        response.append("was called after words from outside were read")
    response += [
        f"runs for the first time what {words}" for origin, words in _FIRST_RUN.items() if origin in first_runs
    ]
    if first_runs and packages:
        response.append(f"installs packages for that: {', '.join(packages)}")
    if ANYWHERE in touches.writes:
        response.append("changes things, and is not held in a sandbox")
    if paths := [path for path in touches.writes if path != ANYWHERE]:
        response.append(f"may change {', '.join(paths)}")
    if touches.sends:
        response.append(f"may send data to {', '.join(touches.sends)}")
    return tuple(response)


def matching_rule(
    rules: Iterable[ApprovalRule],
    plan: Plan,
    touches: Effects,
    *,
    actor: str,
    project: str,
    contents: Collection[str],
    scopes: Collection[str],
    now: int,
) -> ApprovalRule | None:
    """Return a rule that says yes to a plan in a project already, at a time in milliseconds.

    `contents` are the digests of the content that it has: a rule with a digest needs one of them. `scopes` are those of
    its caller: a rule with a scope needs one of them.
    """
    for rule in rules:
        holds = (
            (not rule.scope or rule.scope in scopes)
            and (rule.expires_at is None or now < rule.expires_at)
            and rule.actor in {"", actor}
            and (not rule.digest or rule.digest in contents)
            and (rule.project == project or not (rule.project or is_of_project(rule.item)))
        )
        if holds and _covers(rule, plan, touches):
            return rule
    return None


def is_of_project(item: str) -> bool:
    """Whether a name, or a pattern of names, is about items of a project: they are other ones in each."""
    return item.startswith("project/")


def _covers(rule: ApprovalRule, plan: Plan, touches: Effects) -> bool:
    """Whether a rule is about a plan; one that names paths, hosts or a digest has to name all that is touched."""
    if not fits_item(rule.item, plan.identity):
        return False
    if rule.argv and not (isinstance(plan.spec, ProcessSpec) and plan.spec.argv[: len(rule.argv)] == rule.argv):
        return False
    if not (rule.paths or rule.hosts or rule.digest):
        return True
    return all(any(fits_path(glob, path) for glob in rule.paths) for path in touches.writes) and all(
        any(fits_host(glob, host) for glob in rule.hosts) for host in touches.sends
    )
