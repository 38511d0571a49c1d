"""The actions that change items: create, update, delete, validate and sign."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.lock import NAME as LOCK_NAME
from kiwi_mcp.catalog.lock import forget, record
from kiwi_mcp.domain.errors import (
    AlreadyExists,
    InvalidRequest,
    KiwiError,
    PolicyDenied,
    ReservedName,
    VersionSealed,
)
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.kernel.answers import Answer
from kiwi_mcp.kernel.authoring.checking import Verdict, examine
from kiwi_mcp.kernel.authoring.compose import changed_item, new_item
from kiwi_mcp.kernel.authoring.drafts import Draft, discard, write, write_all
from kiwi_mcp.kernel.authoring.signing import sign_item
from kiwi_mcp.kernel.authoring.trial import judge_draft, read_path
from kiwi_mcp.kernel.keys.signer import Signer
from kiwi_mcp.kernel.naming import mark_changed
from kiwi_mcp.kernel.places import refuse_nowhere
from kiwi_mcp.kernel.provenance import Authorship
from kiwi_mcp.kernel.requests import ExecuteRequest
from kiwi_mcp.manifest.openapi import tools_from_openapi
from kiwi_mcp.manifest.signature import line

_EXIT_INVALID = 4


class Author:
    """Changes the items of a project or of the user, each change whole or not at all.

    Only the owner says which MCP servers there are, and what starts them: others neither write nor remove one.
    `authorship` takes down who wrote what, before it is written; `signer` vouches for what is signed.
    """

    def __init__(
        self,
        catalog: Catalog,
        report: Report,
        *,
        is_owner: bool = True,
        authorship: Authorship | None = None,
        signer: Signer | None = None,
    ) -> None:
        self._signer = signer
        self._is_owner = is_owner
        self._authorship = authorship
        self._catalog = catalog
        self._space = catalog.space
        self._report = report

    async def act(self, request: ExecuteRequest) -> Answer:
        """Do what the request's action says."""
        words = as_object(request.parameters)  # type: ignore[arg-type]  # JSON came in, so JSON it is
        match request.action:
            case "create":
                return Answer(await self._create(request, words))
            case "update":
                return Answer(await self._update(request, words))
            case "delete":
                return Answer(self._delete(request, words))
            case "sign":
                return Answer(await self._sign(request, words))
            case _:
                return await self._validate(request, words)

    async def _create(self, request: ExecuteRequest, words: JsonObject) -> JsonObject:
        source, base = self._location(words)
        if "openapi" in words:
            return await self._create_from_openapi(request, words, source, base)
        tool_id, draft = new_item(request.item_id, words, request.item_type)
        self._refuse_taken(tool_id, source)
        verdict = await self._try(draft, source, tool_id)
        if not request.dry_run:
            self._take_down([verdict.digest], source)
            write(draft, base)
            self._mark(verdict.tool_type)
        return self._told(request, tool_id, "created", draft, base, verdict)

    async def _create_from_openapi(
        self, request: ExecuteRequest, words: JsonObject, source: Source, base: Path
    ) -> JsonObject:
        """Create an api tool for each operation of a document: all of them, or none."""
        self._report(Progress("reading the OpenAPI document"))
        made = tools_from_openapi(
            as_text(words.get("openapi")),
            what="The OpenAPI document",
            prefix=as_text(words.get("prefix")),
            base_url=as_text(words.get("base_url")) or None,
            only=tuple(map(text_of, as_list(words.get("only")))),
            auth=as_object(words.get("auth")),
        )
        drafts = dict(
            new_item(None, {"manifest": one, "category": words.get("category") or one.get("category")}, "tool")
            for one in made.manifests
        )
        digests = []
        for number, (tool_id, draft) in enumerate(drafts.items()):
            self._report(Progress(f"checking {tool_id}", done=number, total=len(drafts)))
            self._refuse_taken(tool_id, source)
            verdict = await judge_draft(draft, source, tool_id, self._catalog)
            verdict.demand(tool_id)
            digests.append(verdict.digest)
        if not request.dry_run:
            self._take_down(digests, source)
            write_all(drafts.values(), base)
        done = "would be created" if request.dry_run else "created"
        return {
            "action": "create",
            "status": "planned" if request.dry_run else "created",
            "message": f"{len(drafts)} tool{'s' * (len(drafts) != 1)} {done} from the document",
            "created": list(drafts),
            "skipped": [issue.to_json() for issue in made.skipped],
            "next": "Look at one with `load`, set the variables it names, then run it.",
        }

    async def _update(self, request: ExecuteRequest, words: JsonObject) -> JsonObject:
        tool, base = self._meant(request, words)
        if not words.keys() - {"location"}:
            raise InvalidRequest(
                "The request says nothing that should change.",
                suggestion="Send words of the manifest, `files` or `content` as parameters.",
            )
        root = tool.origin.path.parent if tool.origin.is_folder else tool.origin.path
        draft = changed_item(tool, words, root.relative_to(base).as_posix())
        verdict = await self._try(draft, tool.origin.source, tool.id)
        if not request.dry_run:
            self._take_down([verdict.digest], tool.origin.source, over=tool)
            old = discard(root, base)
            try:
                write(draft, base)
            except BaseException:
                old.rename(root)
                raise
            self._mark(verdict.tool_type)
        return self._told(request, tool.id, "updated", draft, base, verdict)

    def _delete(self, request: ExecuteRequest, words: JsonObject) -> JsonObject:
        tool, base = self._meant(request, words)
        root = tool.origin.path.parent if tool.origin.is_folder else tool.origin.path
        told: dict[str, Json] = {"tool_id": tool.id, "action": "delete", "path": str(root)}
        if request.dry_run:
            return {**told, "status": "planned", "message": f"{tool.id} would be moved to the trash"}
        kept = discard(root, base)
        forget(base / LOCK_NAME, tool)
        self._mark(tool.manifest.tool_type)
        return {**told, "status": "deleted", "message": f"{tool.id} was moved to the trash", "trash_path": str(kept)}

    async def _sign(self, request: ExecuteRequest, words: JsonObject) -> JsonObject:
        tool, base = self._owned(request, words)
        self._check_category(tool, words)
        self._report(Progress(f"checking {tool.id}"))
        (await examine(tool, self._catalog)).demand(tool.id)
        chain = self._catalog.resolve(tool.identity)
        timestamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if not request.dry_run:
            if self._authorship:
                self._authorship.vouches([tool])
            sign_item(tool, timestamp, self._signer)
            record(base / LOCK_NAME, chain)
        return {
            "tool_id": tool.id,
            "action": "sign",
            "status": "planned" if request.dry_run else "signed",
            "message": f"Tool {'would be signed' if request.dry_run else 'signed successfully'}",
            "signature": line(timestamp, tool.digest),
            "hash": tool.digest,
            **({"signer": self._signer.key.fingerprint} if self._signer else {}),
            "path": str(tool.origin.path),
        }

    async def _validate(self, request: ExecuteRequest, words: JsonObject) -> Answer:
        tool_id, verdict = await self._examined(request, words)
        is_valid = not verdict.errors
        told: JsonObject = {
            "tool_id": tool_id,
            "action": "validate",
            "status": "valid" if is_valid else "invalid",
            "valid": is_valid,
            "issues": [issue.to_json() for issue in verdict.errors],
            "warnings": [issue.to_json() for issue in verdict.warnings],
        }
        return Answer(told, exit_code=0 if is_valid else _EXIT_INVALID)

    async def _examined(self, request: ExecuteRequest, words: JsonObject) -> tuple[str, Verdict]:
        """Return the name and the faults of what is to be validated: an item, a file, or a manifest in the request."""
        if path := as_text(words.get("path")):
            tool = read_path(Path(path), self._catalog)
            return tool.id, await examine(tool, self._catalog)
        if request.item_id and not words.keys() - {"location", "category"}:
            tool = self._catalog.find(request.item_id)
            return tool.id, await examine(tool, self._catalog)
        tool_id, draft = new_item(request.item_id, words, request.item_type)
        return tool_id, await judge_draft(draft, "project", tool_id, self._catalog)

    async def _try(self, draft: Draft, source: Source, tool_id: str) -> Verdict:
        """Check a draft as if it were in place, and refuse it with every fault it has."""
        self._report(Progress(f"checking {tool_id}"))
        verdict = await judge_draft(draft, source, tool_id, self._catalog)
        self._refuse_servers(verdict.tool_type)
        verdict.demand(tool_id or "The item")
        return verdict

    def _take_down(self, digests: Sequence[str], into: Source, over: Tool | None = None) -> None:
        if self._authorship:
            self._authorship.writes(digests, into, over)

    def _location(self, words: JsonObject) -> tuple[Source, Path]:
        match words.get("location", "project"):
            case "project":
                refuse_nowhere(self._space)
                return "project", self._space.project_ai
            case "user":
                return "user", self._space.user
            case other:
                raise InvalidRequest(f"{other!r} is not a location.", suggestion="Use `project` or `user`.")

    def _refuse_taken(self, tool_id: str, source: Source) -> None:
        try:
            found = self._catalog.find(tool_id, source=source)
        except KiwiError:
            found = None
        # Asked after the search, which is what makes a new catalog look at its sources.
        if self._catalog.is_reserved(tool_id):
            raise ReservedName(tool_id)
        if found is not None:
            raise AlreadyExists(tool_id, path=str(found.origin.path))

    def _owned(self, request: ExecuteRequest, words: JsonObject) -> tuple[Tool, Path]:
        """Return an item that may be changed, and the space it lies in."""
        if not request.item_id:
            raise InvalidRequest("The request names no item.", suggestion="Send `item_id`.")
        source = self._location(words)[0] if "location" in words else None
        tool = self._catalog.find(request.item_id, source=source)
        match tool.origin.source:
            case "project":
                return tool, self._space.project_ai
            case "user":
                return tool, self._space.user
            case "registry":
                raise VersionSealed(tool.identity)
            case "mcp":
                raise InvalidRequest(
                    f"{tool.id!r} is what an MCP server offers.",
                    suggestion="Copy it first: load it with `destination: project`, then change the copy.",
                    tool_id=tool.id,
                )
            case _:
                raise ReservedName(tool.id)

    def _meant(self, request: ExecuteRequest, words: JsonObject) -> tuple[Tool, Path]:
        """Return an item that is to be changed; one that every project uses must be meant by its location."""
        tool, base = self._owned(request, words)
        self._refuse_servers(tool.manifest.tool_type)
        if tool.origin.source == "user" and "location" not in words and self._space.user != self._space.project_ai:
            raise InvalidRequest(
                f"{tool.id!r} is in the user's space, which every project uses, and not in this project.",
                suggestion="Say `location: user` (`--location user`) if you mean that one.",
                tool_id=tool.id,
            )
        return tool, base

    def _refuse_servers(self, tool_type: str) -> None:
        if not self._is_owner and self._catalog.sheets.carries(tool_type, "mcp"):
            raise PolicyDenied(
                "Only the owner says which MCP servers there are, and what starts them.",
                suggestion="Ask the owner to type `kiwi mcp add NAME -- COMMAND`, or `kiwi mcp remove NAME`.",
            )

    def _mark(self, tool_type: str) -> None:
        """Let it be known that servers may be others now, where one was written or removed."""
        if self._catalog.sheets.carries(tool_type, "mcp"):
            mark_changed(self._space.user)

    def _check_category(self, tool: Tool, words: JsonObject) -> None:
        wanted = as_text(words.get("category"))
        if wanted and tool.manifest.category and wanted != tool.manifest.category:
            raise InvalidRequest(
                f"{tool.id!r} is in the category {tool.manifest.category!r}, not {wanted!r}.",
                suggestion="Move the item's file to that folder, or leave `category` out.",
            )

    def _told(
        self, request: ExecuteRequest, tool_id: str, done: str, draft: Draft, base: Path, verdict: Verdict
    ) -> JsonObject:
        told: dict[str, Json] = {
            "tool_id": tool_id,
            "action": request.action,
            "status": "planned" if request.dry_run else done,
            "message": f"{tool_id} {'would be' if request.dry_run else 'was'} {done}",
            "path": str(draft.manifest_path(base)),
            "files": sorted(draft.files),
            # The owner's yes to a run is to these very bytes, the line of a signature among them.
            "next": f"Sign it (action sign, `kiwi sign {tool_id}`), then run it (action run, `kiwi run {tool_id}`): "
            "if it is signed after a run was approved, that is asked about again.",
        }
        if verdict.warnings:
            told["warnings"] = [issue.to_json() for issue in verdict.warnings]
        return told
