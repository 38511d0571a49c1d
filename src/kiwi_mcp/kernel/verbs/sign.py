"""Sign and validate items."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field

from kiwi_mcp.catalog.lockfile import NAME as LOCK_NAME
from kiwi_mcp.catalog.lockfile import SignedBy, lock_at, record
from kiwi_mcp.domain.errors import Conflict, InvalidRequest, PolicyDenied
from kiwi_mcp.domain.items import ItemType, Source, Tool
from kiwi_mcp.domain.json import as_text
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.kernel.context import Context, VerbContext
from kiwi_mcp.kernel.signer import Signer, sign_item
from kiwi_mcp.kernel.validation import Verdict, examine, judge_draft, read_path
from kiwi_mcp.kernel.verb import (
    ANYONE,
    AUTHOR,
    OF_TYPE,
    AnyJson,
    Argument,
    DryRun,
    ItemKind,
    ItemRequest,
    NameText,
    Option,
    PlaceToWrite,
    ProjectRequest,
    Response,
    verb,
)
from kiwi_mcp.kernel.verbs.create import Author, hidden_names, new_item, owned, refuse_tampered, warned
from kiwi_mcp.kernel.view import Data, Notice, ViewItem, count_text, issue_text, warning_rows
from kiwi_mcp.manifest.files import writing
from kiwi_mcp.manifest.signatures import line

_EXIT_INVALID = 4


class SignRequest(ItemRequest, frozen=True, kw_only=True):
    """What to sign."""

    location: PlaceToWrite = None
    category: Annotated[NameText | None, Option("The category it must be in.")] = None
    digest: Annotated[NameText | None, Meta(description="The digest it must have")] = None
    dry_run: DryRun = False


class SignResponse(Response, frozen=True, kw_only=True):
    """The signature of an item."""

    tool_id: str
    action: str = "sign"
    status: str
    message: str
    signature: str
    hash: str
    signer: str | UnsetType = UNSET
    path: str
    warnings: list[AnyJson] | UnsetType = UNSET


@verb("sign", wire=("execute", "sign"), access=AUTHOR, needs_receipt=True, everyday="sign")
async def sign(request: SignRequest, context: VerbContext) -> SignResponse:
    """Validate a tool, then write its signature line and the lockfile."""
    author = Author.of(request.item_id, request.project_path, context)
    return await sign_checked(request, author, Signer.of(context.services.user) if author.is_owner else None)


async def sign_checked(request: SignRequest, author: Author, signer: Signer | None) -> SignResponse:
    """Sign an item as it is, after it was checked; without a signer the line says only that nothing changed."""
    tool, base = owned(author, request, request.location)
    if request.digest and tool.digest != request.digest:
        raise Conflict(
            f"{tool.id!r} was changed meanwhile; nothing was signed.",
            suggestion="Look at its files, then sign it again.",
            tool_id=tool.id,
        )
    refuse_tampered(author, tool, base)
    _refuse_signing_over(author, tool, base)
    if request.category and tool.manifest.category and request.category != tool.manifest.category:
        raise InvalidRequest(
            f"{tool.id!r} is in the category {tool.manifest.category!r}, not {request.category!r}.",
            suggestion="Move the item's file to that folder, or leave `category` out.",
        )
    hidden = hidden_names(author, tool, request)
    author.context.caller.report(Progress(f"checking {tool.id}"))
    (await examine(tool, author.context)).demand(tool.id)
    chain = author.catalog.resolve(tool.identity, item_type=tool.item_type)
    timestamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if not request.dry_run:
        if author.authorship:
            author.authorship.vouches([tool])
        key = signer.key.fingerprint if signer else ""
        with writing(base):
            sign_item(tool, timestamp, signer)
            record(base / LOCK_NAME, chain, SignedBy("owner", key) if author.is_owner else None)
    return SignResponse(
        tool_id=tool.id,
        status="planned" if request.dry_run else "signed",
        message=f"{tool.item_type.capitalize()} {'would be signed' if request.dry_run else 'signed successfully'}",
        signature=line(timestamp, tool.digest),
        hash=tool.digest,
        signer=signer.key.fingerprint if signer else UNSET,
        path=str(tool.origin.path),
        warnings=warned(hidden),
    )


def _refuse_signing_over(author: Author, tool: Tool, base: Path) -> None:
    """Refuse to let anyone but the owner replace a signature of the owner or of a publisher by a plain hash."""
    signer = lock_at(base / LOCK_NAME).signer(tool)
    has_key = tool.signature is not None and bool(tool.signature.key)
    if not author.is_owner and (signer or has_key):
        raise PolicyDenied(
            f"{tool.id!r} is signed by {signer or 'a key'}, and only the owner signs it again.",
            suggestion=f"It can be run as it is. For another signature the owner types `kiwi sign {tool.id}`.",
            tool_id=tool.id,
        )


class ValidateRequest(ProjectRequest, frozen=True, kw_only=True):
    """What to validate: an item, the file at the `path` of the parameters, or a manifest in them."""

    item_type: Annotated[ItemKind | None, Option(OF_TYPE, "--type", metavar="TYPE")] = None
    item_id: Annotated[
        NameText | None, Argument("A file, a tool's folder, or an item's name.", "FILE|ITEM", kind="path_or_name")
    ] = None
    parameters: dict[str, AnyJson] = field(default_factory=dict)

    def named_item(self) -> str:
        """Return the item, if the request names one that exists: it has no path and no manifest."""
        return "" if self.parameters.keys() - {"location", "category"} else self.item_id or ""

    def named_kind(self) -> tuple[ItemType | None, Source | None]:
        """Return the type of the item."""
        return None if self.item_type == "output" else self.item_type, None


class ValidateResponse(Response, frozen=True, kw_only=True):
    """Every issue of an item."""

    tool_id: str
    action: str = "validate"
    status: str
    valid: bool
    issues: list[dict[str, AnyJson]]
    warnings: list[dict[str, AnyJson]]

    def exit_status(self) -> int:
        """Return the exit code: not zero for an item with errors."""
        return 0 if self.valid else _EXIT_INVALID


def _validate_view(response: ValidateResponse) -> Iterator[ViewItem]:
    for issue in response.issues:
        yield Data(issue_text(issue))
    yield from warning_rows(response.warnings)
    found = count_text(len(response.issues), "issue") if response.issues else "valid"
    yield Notice(f"{response.tool_id}: {found}")


@verb(
    "validate",
    group="tool",
    wire=("execute", "validate"),
    access=ANYONE,
    records=False,
    needs_rules=True,
    aliases=("validate",),
    shows=_validate_view,
)
async def validate(request: ValidateRequest, context: VerbContext) -> ValidateResponse:
    """List every issue of an item, with its place, reason and fix."""
    services = context.services
    catalog = services.catalogs.for_item(request.item_id or "", request.project_path)
    tool_id, verdict = await _examined(request, services.context(context.caller, catalog))
    return ValidateResponse(
        tool_id=tool_id,
        status="invalid" if verdict.errors else "valid",
        valid=not verdict.errors,
        issues=[dict(issue.to_json()) for issue in verdict.errors],
        warnings=[dict(issue.to_json()) for issue in verdict.warnings],
    )


async def _examined(request: ValidateRequest, context: Context) -> tuple[str, Verdict]:
    """Return the name and the faults of what is to be validated: an item, a file, or a manifest in the request."""
    catalog = context.catalog
    words, (item_type, _) = request.parameters, request.named_kind()
    if path := as_text(words.get("path")):
        tool = read_path(Path(path), catalog)
        return tool.id, await examine(tool, context)
    if name := request.named_item():
        tool = catalog.find(name, item_type=item_type)
        return tool.id, await examine(tool, context)
    tool_id, draft = await asyncio.to_thread(
        new_item, request.item_id, words, request.item_type or "tool", catalog.sheets
    )
    return tool_id, await judge_draft(draft, "project", tool_id, context)
