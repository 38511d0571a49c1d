"""registry move: copy the store to another database, and use that one."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import Annotated, Any

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.settings import FILE_NAME, registry_settings
from kiwi_mcp.kernel.store import Store, last_url, note_url
from kiwi_mcp.kernel.verb import OWNER, Argument, LongText, Option, Request, Response, verb
from kiwi_mcp.manifest.owner_yaml import rewrite_keys
from kiwi_mcp.store.move import copy_store
from kiwi_mcp.store.open import connect_to, masked, open_database


class MoveRequest(Request, frozen=True, kw_only=True):
    """The new store."""

    url: Annotated[LongText, Argument("`postgresql://user@host/database` or `sqlite:///absolute/path`.", "URL")]
    empty: Annotated[bool, Option("Switch to it and copy nothing.")] = False


class MoveResponse(Response, frozen=True, kw_only=True):
    """Which store is used now, and which one was."""

    action: str = "move"
    status: str = "moved"
    message: str
    url: str
    before: str
    rows: int


@verb("move", group="registry", access=OWNER, hint="Ask the owner to type `kiwi registry move URL`.", is_local=True)
def move(request: MoveRequest, context: VerbContext) -> MoveResponse:
    """Copy the store to another database, compare the copy, and use it from then on; the old one stays."""
    store, url = context.services.store, request.url
    if masked(url) != url:
        raise InvalidRequest(
            "The address holds a password, which other users of this machine can see.",
            suggestion="Leave it out, and put it into `~/.pgpass` or the variable PGPASSWORD.",
        )
    used = registry_settings(store.user).url
    before = used if used != url else last_url(store.user)
    if before == url:
        raise InvalidRequest(f"The store is {url} already.", suggestion="Name another database.")
    if request.empty:
        rows, done = 0, "nothing was copied"
        _switch(store, url)
    else:
        rows = _copy(store, before, url)
        done = f"{rows} rows were copied and compared"
    message = f"The store is {url} now; {done}. {masked(before)} stays as it was."
    return MoveResponse(message=message, url=url, before=masked(before), rows=rows)


def _copy(store: Store, before: str, url: str) -> int:
    is_used = registry_settings(store.user).url == before
    opened = nullcontext(store.registry().database) if is_used else closing(connect_to(before))
    with opened as source, closing(open_database(url)) as target:
        return copy_store(source, target, lambda: _switch(store, url))


def _switch(store: Store, url: str) -> None:
    """Write into the owner's file which store is used from now on."""

    def change(written: dict[str, Any]) -> None:
        written["url"] = url

    rewrite_keys(store.user / FILE_NAME, change, check=lambda: registry_settings(store.user))
    note_url(store.user, url)
    store.try_again()
