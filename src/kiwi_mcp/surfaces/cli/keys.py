"""`kiwi key`: the keys that vouch for items: your own, and those of publishers whom you trust."""

from __future__ import annotations

from typing import Annotated

import typer

from kiwi_mcp.surfaces.cli.shell import IsJson, shell_for
from kiwi_mcp.surfaces.cli.show import payload

keys = typer.Typer(
    help="Whose keys vouch for tools: make yours, trust and revoke those of others.", no_args_is_help=True
)

Key = Annotated[str, typer.Argument(metavar="KEY", help="A public key, or its fingerprint.")]
MaybeName = Annotated[str | None, typer.Option("--name", help="What to call it.")]
Expires = Annotated[str | None, typer.Option("--expires", help="Until when it counts: 2027-01-31, or 90d.")]


@keys.command()
def new(name: MaybeName = None, expires: Expires = None, is_json: IsJson = False) -> None:
    """Make your key; what you sign and publish bears it from then on."""
    request = payload(action="new", name=name, expires=expires)
    shell_for(None, is_json=is_json).tell("key", request, view="key change")


@keys.command("list")
def list_(is_json: IsJson = False) -> None:
    """List your keys, and those of the publishers whom you trust."""
    shell_for(None, is_json=is_json).tell("key", payload(action="list"), view="key list")


@keys.command()
def show(
    key: Annotated[str | None, typer.Argument(help="A key or its fingerprint; your own otherwise.")] = None,
    publisher: Annotated[str | None, typer.Option(help="The key of this publisher.")] = None,
    is_json: IsJson = False,
) -> None:
    """Show one key whole, to give it to others."""
    request = payload(action="show", key=key, publisher=publisher)
    shell_for(None, is_json=is_json).tell("key", request, view="key show")


@keys.command()
def trust(
    publisher: Annotated[str, typer.Argument(help="A namespace, or public/NAME for one item of it.")],
    key: Annotated[str | None, typer.Argument(help="Their public key, 43 characters.")] = None,
    rotation: Annotated[str | None, typer.Option(help="The line by which their old key hands over.")] = None,
    expires: Expires = None,
    is_json: IsJson = False,
) -> None:
    """Trust a publisher's key: what it signs there is verified."""
    request = payload(action="trust", publisher=publisher, key=key, rotation=rotation, expires=expires)
    shell_for(None, is_json=is_json).tell("key", request, view="key change")


@keys.command()
def revoke(
    key: Key,
    publisher: Annotated[str | None, typer.Option(help="Only as the key of this publisher.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", "-m", help="Why.")] = None,
    is_json: IsJson = False,
) -> None:
    """Let a key vouch for nothing any more."""
    request = payload(action="revoke", key=key, publisher=publisher, reason=reason)
    shell_for(None, is_json=is_json).tell("key", request, view="key change")


@keys.command()
def rotate(name: MaybeName = None, expires: Expires = None, is_json: IsJson = False) -> None:
    """Sign with another key from now on; the old one says so to whoever trusts it."""
    request = payload(action="rotate", name=name, expires=expires)
    shell_for(None, is_json=is_json).tell("key", request, view="key change")
