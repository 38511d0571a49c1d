"""up token: the tokens of those who may use the gateway; list, add, remove."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType, field

from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.verb import OWNER, Argument, NameText, NoArguments, Option, Request, Response, verb
from kiwi_mcp.kernel.view import Data, Hint, Notice, ViewItem, rows, warning_rows
from kiwi_mcp.policy.tokens import TokenStore

TokenName = Annotated[NameText, Argument("The user of the token; the record names them.", "NAME")]


class TokenLine(Response, frozen=True, kw_only=True):
    """A token as lists show it: without the token itself."""

    name: str
    namespaces: list[str]
    right: str
    tools: bool
    author: bool
    manage: bool
    kind: str = field(name="as")
    principal: str
    created_at: str


class TokenListResponse(Response, frozen=True, kw_only=True):
    """All tokens."""

    tokens: list[TokenLine]


def _list_view(response: TokenListResponse) -> Iterator[ViewItem]:
    yield from rows(map(_row, response.tokens), "There are no tokens.")
    if not response.tokens:
        yield Hint("kiwi up token add NAME --tools, or --namespaces public --write")


def _row(one: TokenLine) -> str:
    rights = f"{one.right}{' tools' * one.tools}{' author' * one.author}{' manage' * one.manage}"
    return f"{one.name}  {one.kind}  {rights}  {','.join(one.namespaces) or '-'}  {one.created_at}"


@verb("list", group="up token", wire=("tokens", "list"), access=OWNER, records=False, is_local=True, shows=_list_view)
def list_tokens(request: NoArguments, context: VerbContext) -> TokenListResponse:  # noqa: ARG001 - a verb
    """List the tokens, without the tokens themselves."""
    found = TokenStore(context.services.user).all()
    return TokenListResponse(tokens=[msgspec.convert(one.to_json(), TokenLine) for one in found])


class TokenAddRequest(Request, frozen=True, kw_only=True):
    """The user of a token, and their rights."""

    name: TokenName
    namespaces: Annotated[
        list[NameText] | None, Option("Their namespaces, with commas: acme,public.", kind="commas")
    ] = None
    write: Annotated[bool, Option("They may publish.")] = False
    read: Annotated[bool, Option("They may only read, which is the default.", is_sent=False)] = False
    tools: Annotated[bool, Option("Let them use tools here, with your rights.")] = False
    author: Annotated[bool, Option("Let them make and change items here as well.")] = False
    manage: Annotated[bool, Option("A token of the owner for programs: it can approve calls and change rules.")] = False
    kind: Annotated[
        NameText | None, Option("The kind of user: owner, agent (the default) or service.", "--as", metavar="KIND")
    ] = field(default=None, name="as")


class TokenAddResponse(Response, frozen=True, kw_only=True):
    """The token, which is shown this once and stored nowhere: no receipt may hold it."""

    name: str
    kind: str = field(name="as")
    token: str
    manage: bool | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


_RUNS = "everyone who has it can run here what you can run."
_MANAGES = "everyone who has it can approve calls and change rules. Never give it to a model or an MCP client."


def _add_view(response: TokenAddResponse) -> Iterator[ViewItem]:
    yield Data(response.token)
    yield from warning_rows(response.warnings)
    if response.manage:
        yield Hint("it is shown this once. Programs send it to the addresses below `/v1/`; `/mcp` refuses it.")
    elif response.warnings:
        yield Hint("it is shown this once. Paste into an MCP client the address that `kiwi up` prints, such as")
        yield Notice("  http://127.0.0.1:8765/mcp, and the header `Authorization: Bearer TOKEN` with this token in it.")
    else:
        yield Hint("it is shown this once; keep it in a variable such as TEAM_TOKEN, and name `${TEAM_TOKEN}`.")


@verb("add", group="up token", wire=("tokens", "add"), access=OWNER, needs_receipt=True, is_local=True, shows=_add_view)
def add_token(request: TokenAddRequest, context: VerbContext) -> TokenAddResponse:
    """Make a token; it is shown only once."""
    kind = request.kind or ("owner" if request.manage else "agent")
    can_use_tools = request.tools or request.manage
    token = TokenStore(context.services.user).add(
        request.name,
        request.namespaces or (),
        can_write=request.write,
        can_use_tools=can_use_tools,
        can_author=request.author,
        kind=kind,
        can_manage=request.manage,
    )
    warnings = [_RUNS] * can_use_tools + [_MANAGES] * request.manage
    return TokenAddResponse(
        name=request.name, kind=kind, token=token, manage=request.manage or UNSET, warnings=warnings or UNSET
    )


class TokenRemoveRequest(Request, frozen=True, kw_only=True):
    """The user of the token."""

    name: TokenName


class TokenRemoveResponse(Response, frozen=True, kw_only=True):
    """That the token is refused from now on."""

    name: str
    removed: bool = True


def _remove_view(response: TokenRemoveResponse) -> Iterator[ViewItem]:
    yield Data(f"The token of {response.name} is removed.")


@verb("remove", group="up token", wire=("tokens", "remove"), access=OWNER, is_local=True, shows=_remove_view)
def remove_token(request: TokenRemoveRequest, context: VerbContext) -> TokenRemoveResponse:
    """Remove a token; it is refused afterwards."""
    TokenStore(context.services.user).remove(request.name)
    return TokenRemoveResponse(name=request.name)
