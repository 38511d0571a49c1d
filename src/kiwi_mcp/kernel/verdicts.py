"""Verdicts: everything that a call uses, and what each rule says of it, in the order in which they have a say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.grants import Allow, Deny, Kind, Rights, Verdict
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.plan import Plan
from kiwi_mcp.policy.authorize import uses
from kiwi_mcp.policy.conditions import unmet
from kiwi_mcp.policy.reaching import path_verdicts

_NEEDED: Sequence[tuple[Kind, str]] = (
    ("read", "read"),
    ("write", "write"),
    ("host", "hosts"),
    ("command", "commands"),
)
"""Under which word of `needs` each kind is declared."""


def explain_rights(chain: Chain, rights: Rights, space: Space, bind: Callable[[], Plan]) -> list[JsonObject]:
    """Return a row for each thing that a call uses: whether it may, and by which rule of whom.

    `bind` gives the plan; where it cannot be made, what only a plan shows is left out.
    """
    rows = [*_items(chain, rights), *_needs(chain, rights, space)]
    try:
        plan = bind()
    except KiwiError:
        return rows
    rows += [_row(kind, resource, rights.verdicts(kind, resource)) for kind, resource in uses(plan)]
    refused = unmet(rights, plan.identity, plan.inputs, space.project, datetime.now().astimezone())
    return [*rows, _row("condition", plan.identity, [refused])] if refused else rows


def _items(chain: Chain, rights: Rights) -> Iterator[JsonObject]:
    for place, link in enumerate(chain.links):
        verdicts = rights.verdicts("item", link.identity)
        # What an item stands on needs no rule of its own, and is kept back by one that denies it.
        told = verdicts if place == 0 else [one for one in verdicts if isinstance(one, Deny) and one.rule]
        if told:
            yield _row("item", link.identity, told)


def _needs(chain: Chain, rights: Rights, space: Space) -> Iterator[JsonObject]:
    for kind, word in _NEEDED:
        asked: Iterable[str] = getattr(chain.needs, word)
        for text in asked:
            try:
                found = (
                    path_verdicts(kind, text, rights, space)
                    if kind in {"read", "write"}
                    else rights.verdicts(kind, text)
                )
            except KiwiError as error:
                found = (Deny(error.message, "", "the item's needs"),)
            yield _row(kind, text, [*found, Allow(f"needs.{word}", text)])


def _row(kind: str, resource: str, verdicts: Sequence[Verdict]) -> JsonObject:
    steps: list[Json] = [
        {"grant": one.grant, "rule": one.rule or None, "allowed": isinstance(one, Allow)} for one in verdicts
    ]
    refusal = next((one for one in verdicts if isinstance(one, Deny)), None)
    told: dict[str, Json] = {"kind": kind, "resource": resource, "allowed": refusal is None, "rules": steps}
    return {**told, "reason": refusal.reason} if refusal else told
