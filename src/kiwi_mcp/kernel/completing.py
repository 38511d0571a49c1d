"""Completing: what an MCP server proposes while an argument of one of its prompts or templates is typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Call, Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.grants import Rights, Rules
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.json import as_object
from kiwi_mcp.kernel.confining import Judge
from kiwi_mcp.kernel.pipeline import driver_of, prepare, secrets_of
from kiwi_mcp.kernel.reach import reaching

_ANYTHING = "x"


class _Completer(Protocol):
    """The driver of what MCP servers offer, as far as it is asked here."""

    async def complete(
        self,
        chain: Chain,
        space: Space,
        secrets: Mapping[str, str],
        argument: str,
        value: str,
        context: Mapping[str, str],
        *,
        hosts: Rules | None = None,
        jail: Jail | None = None,
    ) -> list[str]:
        """Return what a server proposes."""


async def complete(
    item_id: str, catalog: Catalog, rights: Rights, judge: Judge, argument: str, value: str, known: Mapping[str, str]
) -> Sequence[str]:
    """Return the proposals for an argument of which `value` is typed; nothing where the item could not be called."""
    try:
        chain = catalog.resolve(item_id)
        if chain.driver != "mcp":
            return ()
        # It passes the gates of a call, whose other arguments are not known yet.
        wanted = as_object(chain.tool.manifest.parameters.get("properties"))
        call = Call(item_id, catalog.space, {name: known.get(name, _ANYTHING) for name in wanted})
        bound = prepare(call, catalog, rights, judge)
        secrets = secrets_of(call, bound, judge)
        driver = cast("_Completer", driver_of(chain))
        hosts = reaching(rights, chain.executor, catalog).hosts
        return await driver.complete(
            chain, call.space, secrets, argument, value, known, hosts=hosts, jail=bound.plan.jail
        )
    except KiwiError:
        return ()
