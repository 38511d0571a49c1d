"""Addresses nearby: hosts on this machine or in its own network, as an address in a manifest names them."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
# Not link-local: what answers there may give away the machine's own credentials.
_NETWORKS = tuple(map(IPv4Network, ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))) + tuple(
    map(IPv6Network, ("::1/128", "fc00::/7"))
)
_LABEL = re.compile(r"[a-z][a-z0-9-]*")
_ENDINGS = (".localhost", ".local", ".lan", ".internal", ".home.arpa")
"""How names end that only the own network gives out, so that no stranger decides what they lead to."""


def nearby_host(url: str) -> str:
    """Return the host and port of an address in the own network, as `host:port`; empty for every other address.

    A name that the whole world looks up is none: whoever owns it may let it lead anywhere tomorrow.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        return ""
    if not port or "$" in parts.netloc or "{" in parts.netloc or not _is_nearby(host):
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_nearby(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        # A number in an odd spelling is no name, and begins with a digit.
        return host.endswith(_ENDINGS) or _LABEL.fullmatch(host) is not None
    return _is_within(address)


def _is_within(address: IPv4Address | IPv6Address) -> bool:
    return any(address.version == network.version and address in network for network in _NETWORKS)
