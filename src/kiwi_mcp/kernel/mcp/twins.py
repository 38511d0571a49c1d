"""Twins: entries of a client's file whose servers Kiwi has as well, so that the client needs them no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import Invalid, KiwiError
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import as_object
from kiwi_mcp.domain.mcp import ServerKey
from kiwi_mcp.kernel.delivery import held
from kiwi_mcp.kernel.mcp.asking import known_servers
from kiwi_mcp.kernel.mcp.clients import Scope
from kiwi_mcp.kernel.mcp.configurations import read_configuration
from kiwi_mcp.kernel.mcp.drafts import ServerDraft
from kiwi_mcp.kernel.mcp.servers import revealed
from kiwi_mcp.kernel.mcp.words import launch_of
from kiwi_mcp.kernel.places import no_project_space
from kiwi_mcp.manifest.render import variables
from kiwi_mcp.policy.floors import unproven
from kiwi_mcp.primitives.secret_lines import are_same
from kiwi_mcp.primitives.secrets import Secret, Variables
from kiwi_mcp.store.definitions import Definitions


@dataclass(frozen=True, slots=True)
class Twins:
    """The entries that Kiwi can stand for, and those of servers that it has and cannot stand for, with why."""

    names: tuple[str, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)


def twins(path: Path, scope: Scope, catalog: Catalog, remembered: Definitions) -> Twins:
    """Return which entries of a file are servers of Kiwi: reached alike, seen by that client, and accepted."""
    try:
        imported = read_configuration(path)
    except Invalid:  # whoever writes into the file says what is wrong with it
        return Twins()
    space = catalog.space if scope == "project" else no_project_space(catalog.space.user, catalog.space.cache)
    known = known_servers(catalog, remembered)
    judged: dict[str, str] = {}
    for draft in imported.servers:
        if draft.project or draft.is_disabled:
            continue
        launch = launch_of(as_object(draft.manifest.get("config")))
        for server, key in known:
            if launch_of(server.manifest.config) == launch:
                judged[draft.name] = (
                    _unseen(server, scope, space)
                    or _unaccepted(server, key, remembered)
                    or _unlike(draft, imported.secrets, server, catalog, space)
                )
    return Twins(
        tuple(name for name, reason in judged.items() if not reason),
        {name: reason for name, reason in judged.items() if reason},
    )


def _unseen(server: Tool, scope: Scope, space: Space) -> str:
    is_users = server.origin.path.is_relative_to(space.user) or server.origin.source == "registry"
    return "" if scope == "project" or is_users else f"{server.id} is in one project, and this file is for all"


def _unaccepted(server: Tool, key: ServerKey, remembered: Definitions) -> str:
    record = remembered.find(key)
    if record is None or record.digest != server.digest:
        return f"the manifest of {server.id} is not accepted as it is"
    is_usable = any(one.state == "accepted" for one in remembered.of(key))
    return "" if is_usable else f"nothing of {server.id} is accepted"


def _unlike(draft: ServerDraft, secrets: Mapping[str, Secret], server: Tool, catalog: Catalog, space: Space) -> str:
    """Return that Kiwi would not reach a server with the same secrets, from wherever the client starts it."""
    mine = [name for name in variables(as_object(draft.manifest.get("config"))) if name in secrets]
    lasting = Variables().locate(mine, project=space.project, user=space.user, environ={})
    stored = held(mine, space.user)
    if missing := [name for name in mine if lasting[name] is None and name not in stored]:
        return f"{', '.join(missing)} is not kept here: import it with `--with-secrets`"
    try:
        values = revealed(catalog.resolve(server.identity), space, unproven)
    except KiwiError as fault:
        return fault.message
    other = [name for name in mine if not are_same(Secret(values[name]), secrets[name])]
    return f"{', '.join(other)} is another one here" if other else ""
