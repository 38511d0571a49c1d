"""Verdicts: everything that a call uses, and what each rule says of it, in the order in which they have a say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.grants import Allow, Deny, Kind, Rights, Verdict
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.needs import Needs
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.policy.authorize import uses
from kiwi_mcp.policy.reaching import demand_public, path_verdicts

_NEEDED: Sequence[tuple[Kind, str]] = (
    ("read", "read"),
    ("write", "write"),
    ("host", "hosts"),
    ("command", "commands"),
)
"""Under which word of `needs` each kind is declared."""


def explain_rights(
    chain: Chain, needs: Needs, rights: Rights, space: Space, bind: Callable[[], Plan]
) -> list[JsonObject]:
    """Return a row for each thing that a call uses: whether it may, and by which rule of whom.

    `needs` are those of its process. `bind` gives the plan; where there is none, what only a plan shows is left out.
    """
    rows = [*_items(chain, rights), *_needs(needs, rights, space)]
    try:
        plan = bind()
    except KiwiError:
        return rows
    return rows + [_row(kind, resource, rights.verdicts(kind, resource)) for kind, resource in uses(plan)]


def _items(chain: Chain, rights: Rights) -> Iterator[JsonObject]:
    for place, link in enumerate(chain.links):
        verdicts = rights.verdicts("item", link.identity)
        # What an item stands on needs no rule of its own, and is kept back by one that denies it.
        told = verdicts if place == 0 else [one for one in verdicts if isinstance(one, Deny) and one.rule]
        if told:
            yield _row("item", link.identity, told)


def _needs(needs: Needs, rights: Rights, space: Space) -> Iterator[JsonObject]:
    for kind, word in _NEEDED:
        asked: Iterable[str] = getattr(needs, word)
        for text in asked:
            try:
                found = _verdicts(kind, text, rights, space)
            except KiwiError as error:
                found = (Deny(error.message, "", "the item's needs"),)
            yield _row(kind, text, [*found, Allow(f"needs.{word}", text)])


def _verdicts(kind: Kind, text: str, rights: Rights, space: Space) -> tuple[Verdict, ...]:
    if kind in {"read", "write"}:
        return path_verdicts(kind, text, rights, space)
    found = rights.verdicts(kind, text)
    if kind == "host" and not any(isinstance(one, Deny) for one in found):
        demand_public(rights, text)
    return found


def _row(kind: str, resource: str, verdicts: Sequence[Verdict]) -> JsonObject:
    steps: list[Json] = [
        {"grant": one.grant, "rule": one.rule or None, "allowed": isinstance(one, Allow)} for one in verdicts
    ]
    refusal = next((one for one in verdicts if isinstance(one, Deny)), None)
    told: dict[str, Json] = {"kind": kind, "resource": resource, "allowed": refusal is None, "rules": steps}
    return {**told, "reason": refusal.reason} if refusal else told
