"""Reach: the hosts beyond the public network that a call may use, by the owner's policy and by what they accepted."""

from __future__ import annotations

from dataclasses import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.grants import Grant
from kiwi_mcp.domain.items import Tool


def reaching(grant: Grant, server: Tool, catalog: Catalog) -> Grant:
    """Return what the owner grants, and the very address of a server nearby that they added or accepted as it is.

    A rule that denies the host still wins, and nothing that the server names itself is reached thereby.
    """
    hosts = tuple(host for host in catalog.meant_hosts(server) if host not in grant.hosts.allow)
    return replace(grant, hosts=replace(grant.hosts, allow=(*grant.hosts.allow, *hosts))) if hosts else grant
