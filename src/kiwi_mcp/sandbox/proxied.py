"""The way out of a sandbox: the one port inside that answers, the variables that tell of it, and who gets none."""

from __future__ import annotations

from collections.abc import Mapping

from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import PROXY, Handover, Jail
from kiwi_mcp.sandbox.levels import demands

# Always as an HTTP proxy: several clients refuse to start where ALL_PROXY says SOCKS and they lack a package for it.
# The port speaks SOCKS 5 too, for programs that are told so by their own settings.
_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def proxy_variables(jail: Jail) -> Mapping[str, str]:
    """Return the variables by which programs find the proxy; none where a jail has no network."""
    if not jail.hosts:
        return {}
    named = dict.fromkeys(_NAMES, f"http://{PROXY[0]}:{PROXY[1]}") | {"NO_PROXY": ""}
    return {**named, **{name.lower(): value for name, value in named.items()}, "NODE_USE_ENV_PROXY": "1"}


def refuse_without_gate(jail: Jail, handover: Handover, backend: str) -> None:
    """Refuse a process that was promised hosts and is held by what gives it no proxy."""
    if jail.hosts and handover.gate is None and "net_none_or_proxy" in demands(jail.level).requires:
        raise IsolationUnavailable(
            f"The tool needs {', '.join(jail.hosts)}, and {backend} gives a process no way to single hosts. "
            "The tool was not run.",
            suggestion="Install bubblewrap, which does, or remove `needs.hosts` from the tool.",
            level=jail.level,
            backend=backend,
            hosts=list(jail.hosts),
        )


def refuse_hosts(jail: Jail) -> None:
    """Refuse a jail that names hosts at a level that has no network."""
    if jail.hosts and "net_none" in demands(jail.level).requires:
        raise IsolationUnavailable(
            f"Isolation level {jail.level!r} has no network, and the tool needs {', '.join(jail.hosts)}. "
            "The tool was not run.",
            suggestion="Let the owner choose the level `sandboxed` for this tool, or remove `needs.hosts` from it.",
            level=jail.level,
            hosts=list(jail.hosts),
        )
