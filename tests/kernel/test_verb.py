"""Verbs as they are declared: parsing with every fault, the envelope of `execute`, and who may call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pytest

from kiwi_mcp.domain.calls import OWNER as OWNER_PRINCIPAL
from kiwi_mcp.domain.calls import Caller, Principal
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.verb import (
    ANYONE,
    DECLARED,
    NameText,
    Option,
    Request,
    Response,
    Verb,
    arguments_of,
    parse,
    payload_of,
    verb,
)
from kiwi_mcp.kernel.verbs import every_verb


class ShareRequest(Request, frozen=True, kw_only=True):
    """A request of an action of `execute`."""

    item_id: Annotated[NameText, Option("The item.")]
    changelog: NameText = ""
    dry_run: bool = False


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Verb:
    known = dict(DECLARED)

    @verb("share", group="registry", wire=("execute", "share"), access=ANYONE)
    async def share(request: ShareRequest, context: VerbContext) -> Response:
        """Share an item."""
        raise NotImplementedError(request, context)

    declared = DECLARED[("execute", "share")]
    DECLARED.clear()
    DECLARED.update(known)
    return declared


def test_arguments_pass_through_the_envelope_of_execute_and_back(share: Verb) -> None:
    given: Mapping[str, Json] = {"item_id": "greet", "changelog": "New.", "dry_run": True}
    payload = payload_of(share, given)
    assert payload == {"action": "share", "item_id": "greet", "dry_run": True, "parameters": {"changelog": "New."}}

    request = parse(share.request, "execute", arguments_of(share, {**payload, "frozen": False}))
    assert request == ShareRequest(item_id="greet", changelog="New.", dry_run=True)
    assert (share.path, share.receipt, share.resource) == ("registry share", "share", "execute.share")


def test_an_unknown_key_beside_parameters_says_where_it_belongs(share: Verb) -> None:
    with pytest.raises(InvalidRequest) as refused:
        arguments_of(share, {"action": "share", "item_id": "greet", "timezone": "UTC"})
    assert refused.value.message == "Invalid request for `execute`: timezone: unknown argument `timezone`."
    assert refused.value.suggestion == "Put the tool's own arguments inside `parameters`."


def test_every_fault_of_a_request_is_listed_with_its_place() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(ShareRequest, "share", {"changelo": "x", "changelog": "x" * 401, "dry_run": "perhaps"})
    issues = refused.value.details["issues"]
    assert isinstance(issues, list)
    assert sorted(issue["place"] for issue in issues) == ["changelo", "changelog", "dry_run", "item_id"]
    assert "Did you mean `changelog`?" in str(issues)


@pytest.mark.parametrize(
    ("caller", "is_refused"),
    [
        (Caller(), True),
        (Caller(is_owner=True), True),
        (Caller(name="token:ada", identity=Principal("agent", "ada"), is_direct=True), True),
        (Caller(name="token:me", identity=Principal("owner", "me")), True),
        (Caller(name="token:me", identity=Principal("owner", "me"), is_direct=True), True),
        (Caller(name="token:me", identity=Principal("owner", "me"), can_manage=True), True),
        (Caller(name="token:ada", identity=Principal("agent", "ada"), is_direct=True, can_manage=True), True),
        (Caller(name="token:me", identity=Principal("owner", "me"), is_direct=True, can_manage=True), False),
        (Caller(identity=OWNER_PRINCIPAL, is_direct=True, can_manage=True), False),
    ],
)
async def test_only_a_direct_call_of_the_owner_reaches_a_verb_of_the_owner(
    caller: Caller, is_refused: bool, project: Path, home: Path
) -> None:
    kernel = Kernel(project, user=home / ".ai", is_owner=False)
    try:
        answer = await kernel.call("audit", {"action": "list"}, caller)
    finally:
        await kernel.aclose()
    assert answer.is_error is is_refused
    if is_refused:
        assert answer.content["code"] == "not_permitted"
        assert ("`kiwi up token add NAME --manage`" in str(answer.content["suggestion"])) is caller.is_direct


def test_verbs_that_share_something_or_make_it_trusted_need_a_receipt() -> None:
    needing = {verb.receipt for verb in every_verb() if verb.needs_receipt}
    assert needing >= {"publish", "pull", "yank", "rollback", "deprecate"}
    assert needing >= {"key new", "key trust", "key rotate", "relax apply", "tokens add"}
    assert all(verb.records for verb in every_verb() if verb.needs_receipt)
    # What takes trust away never waits for a receipt.
    assert not needing & {"key revoke", "relax undo", "tokens remove", "secrets revoke", "approvals deny"}
