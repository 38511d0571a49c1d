"""The kernel: every verb, answered."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

from msgspec import Struct
from msgspec.structs import replace

import kiwi_mcp.kernel.mcp_servers as mcp_servers  # noqa: PLR0402 - the package itself imports this module
from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.lockfile import NAME as LOCK_NAME
from kiwi_mcp.catalog.lockfile import forget_signer
from kiwi_mcp.domain.calls import NO_CALLER, Caller, Principal, Served
from kiwi_mcp.domain.errors import Internal, KiwiError, PolicyDenied, ToolFailed, ToolNotFound, VerbNotFound
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import ItemType, Source, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.mcp import Offer, OfferKind, Offers
from kiwi_mcp.domain.messages import ReplyDelta
from kiwi_mcp.domain.names import is_tool_id
from kiwi_mcp.domain.outcome import Report
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.threads import ThreadEvent
from kiwi_mcp.kernel.access import REQUEST_GATES, Asked
from kiwi_mcp.kernel.context import Services, VerbContext
from kiwi_mcp.kernel.paths import cache_folder, made_private, user_space
from kiwi_mcp.kernel.recorder import CallRecord
from kiwi_mcp.kernel.threads.wake import start_if_due
from kiwi_mcp.kernel.tool_names import ITEM_TYPES, kind_of, offer_of
from kiwi_mcp.kernel.verb import (
    ACTIONS,
    DECLARED,
    Answer,
    Verb,
    answer_of,
    arguments_of,
    invalid,
    parse,
    place_parameters,
    refusal,
)
from kiwi_mcp.kernel.verbs import BY_NAME, find_verb
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.signatures import sidecar, signature_form, split
from kiwi_mcp.policy import preferences
from kiwi_mcp.policy.policy_files import Authority, OwnerAuthority, ask
from kiwi_mcp.store.tasks import Tasks

_log = logging.getLogger("kiwi")
_WORD = 100
_SUGGESTED = 3
_DECLARE = (
    "A Python file needs `__tool_type__`, `__version__` and `__executor_id__`, any other file a first comment with "
    "`tool_id`, `tool_type`, `version` and `executor` (`help tool`)."
)
_BETWEEN_WORDS = lazy_pattern(r"[\W_]+")
_PAGES = 256
"""How many pages of an output are read at most."""


class UnsignedItem(Struct, frozen=True):
    """An item as its owner is asked to sign it."""

    identity: str
    files: str
    """The path of its manifest, and how many files are signed with it."""
    state: str
    digest: str

    @classmethod
    def of(cls, tool: Tool, state: str) -> UnsignedItem:
        """Return an item in a state: new, changed, or written by a model."""
        others = len(tool.files) - 1
        more = f" with {others} more file{'s' * (others > 1)}" if others > 0 else ""
        return cls(tool.identity, f"{tool.origin.path}{more}", state, tool.digest)


class Kernel:
    """Answers every verb for one user: `await kernel.call("execute", {...})`.

    `project` is the project of requests that name none; without it, they see what every project has. `is_owner` says
    whether requests come directly from the owner; requests of a model do not, and cannot choose where anything is sent.
    `surface` is the way requests arrive, for the receipts. `is_short_lived` says that the process ends after a few
    requests, so that what the next process needs is stored. `authority` decides what each caller may do; the default
    authority reads the owner's files.
    """

    def __init__(
        self,
        project: Path | None = None,
        *,
        user: Path | None = None,
        cache: Path | None = None,
        is_owner: bool = True,
        surface: str = "python",
        is_short_lived: bool = False,
        authority: Authority | None = None,
        served: Served | None = None,
    ) -> None:
        self._user = user or user_space()
        own = authority or OwnerAuthority(self._user)
        folder = cache or made_private(cache_folder())
        self._services = Services(
            project,
            self._user,
            folder,
            own,
            is_owner=is_owner,
            surface=surface,
            check_server=lambda *asked: mcp_servers.check_server(*asked),  # noqa: PLW0108 - loaded with the first server
            dispatch=self.call,
            is_short_lived=is_short_lived,
            served=served,
        )
        start_if_due(self._user)

    async def call(self, verb: str, payload: JsonObject, caller: Caller = NO_CALLER) -> Answer:
        """Answer one verb. Refusals are answers too; only cancellation passes through."""
        self._services.store.look_again()
        family = BY_NAME.get(verb)
        if family is None or not family.imports_numpy or (verb,) in DECLARED:
            declared = find_verb(verb, payload)
        else:  # its module takes a moment, and is imported in a thread
            declared = await asyncio.to_thread(find_verb, verb, payload)
        strays: tuple[str, ...] = ()
        if "parameters" not in payload:
            payload, strays = place_parameters(declared, payload)
        recorder = self._services.recorder
        record = recorder.call(verb, declared, payload)
        if record is None:
            return await self._response(verb, declared, payload, caller, None, strays)
        try:
            response = await self._response(verb, declared, payload, caller, record, strays)
        except asyncio.CancelledError:
            await recorder.enter_cancelled(record, caller.name)
            raise
        return await recorder.enter(record, response, caller.name)

    async def run(self, item_id: str, /, **parameters: Json) -> Json:
        """Run an item and return its whole result.

        Raises the `KiwiError` of a call that was refused, and `ToolFailed` if the tool ran and did not succeed.
        """
        answer = await self.call("execute", {"item_id": item_id, "parameters": parameters})
        if answer.error is not None:
            raise answer.error
        if answer.is_error:
            raise ToolFailed(answer.content)
        return (await whole(self, answer)).get("result")

    def thread(
        self,
        item: str,
        inputs: JsonObject | None = None,
        *,
        limits: Mapping[str, float] | None = None,
        model: str = "",
        caller: Caller = NO_CALLER,
    ) -> AsyncGenerator[ThreadEvent | ReplyDelta | Answer, None]:
        """Start a directive or a thread item, and yield what happens in it until it ends or waits.

        Pieces of replies are `ReplyDelta`, what the journal stores is `ThreadEvent`, and the last one is the answer
        with `thread_id`, `status`, `result` and `usage`:

            async for event in kernel.thread("study", {"topic": "kiwis"}, limits={"spend": 0.5}):
                match event:
                    case ReplyDelta(kind="text", text=text):
                        print(text, end="")
                    case Answer(content={"status": "completed", "result": result}):
                        print(result)

        Raises the `KiwiError` of a refused start. To leave the loop early cancels the thread; close the generator
        (`contextlib.aclosing`) to wait until it has stopped.
        """
        request: JsonObject = {"action": "start", "item_id": item, "inputs": inputs or {}, "wait": True}
        chosen: JsonObject = {"limits": dict(limits or {}), **({"model": model} if model else {})}
        return self.thread_events({**request, **chosen}, caller)

    async def thread_events(
        self, request: JsonObject, caller: Caller = NO_CALLER
    ) -> AsyncGenerator[ThreadEvent | ReplyDelta | Answer, None]:
        """Make a request of the verb `thread`, and yield what happens in the thread meanwhile, then the answer.

        `{"action": "resume", "thread_id": ID, "message": TEXT, "wait": True}` is one turn of a conversation; to leave
        the loop early stops that turn, and the conversation waits for the next message.
        """
        events: asyncio.Queue[ThreadEvent | ReplyDelta | None] = asyncio.Queue()
        call = asyncio.create_task(self.call("thread", request, replace(caller, observe=events.put_nowait)))
        call.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            answer = await call
        finally:
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
        if answer.error is not None:
            raise answer.error
        yield answer

    async def _response(
        self,
        verb: str,
        declared: Verb | None,
        payload: JsonObject,
        caller: Caller,
        record: CallRecord | None,
        strays: tuple[str, ...],
        *,
        is_read: bool = True,
    ) -> Answer:
        """Return the response to a request; unless the caller reads it (`is_read`), its size does not count."""
        services = self._services
        try:
            if declared is None:  # A1 the verb exists, and the request is valid
                _refuse_unknown(verb, payload)
            request = parse(declared.request, verb, arguments_of(declared, payload))
            access = declared.access(request) if callable(declared.access) else declared.access
            context = VerbContext(services, caller, record, strays)
            asked = Asked(verb, declared, request, context, access)
            for gate in REQUEST_GATES:
                gate(asked)
            if record is not None and not record.has_run and not record.is_of_look:  # A9 a receipt can be written
                await services.recorder.begin(record, caller.name)
            response = await declared.function(request, context)
            result = response if isinstance(response, Answer) else answer_of(response)
            is_read = is_read and services.response_sizes.is_counting
            return services.response_sizes.count(verb, result) if is_read else result
        except KiwiError as error:
            return _refusal(await self._pointed(error, payload, caller), verb, payload)
        except Exception:  # noqa: BLE001 - the kernel's edge: a fault of ours is an incident, not a traceback
            incident = os.urandom(6).hex()
            _log.exception("incident %s in %s", incident, verb)
            return _refusal(Internal(incident), verb, payload)

    def authenticate(self, token: str) -> Principal:
        """Return the principal of a token, as the authority knows it; refuse a token that belongs to no principal."""
        return ask(self._services.authority.authenticate, token)

    def acting(self) -> Caller:
        """Return the caller for requests that arrive without one."""
        return NO_CALLER

    def rights(self, caller: Caller) -> Callable[[], Rights]:
        """Return a function that gives the current rules for a caller."""
        return self._services.rights(caller)

    async def offers(self, project_path: str | None = None) -> Offers:
        """Return what a client sees without searching; where no project is known, what it sees in every one."""
        return await self._services.offers(project_path)

    def offers_mark(self, project_path: str | None = None) -> str:
        """Return another text whenever the offers may have changed since they were last asked for, at little cost."""
        return self._services.catalogs.offering(project_path).etag()

    def catalog(self) -> Catalog:
        """Return the items that are seen where a request names no project."""
        return self._services.catalogs.at(None)

    def offered(self, name: str, kind: OfferKind, item_type: ItemType | None = None) -> Offer | None:
        """Return an item as clients see it, whether or not it is listed for them; None where it is of another kind."""
        # What a server offers is a tool to requests, so a prompt may be one of either type.
        for one in (item_type,) if item_type else (*ITEM_TYPES[kind], None):
            with suppress(KiwiError):
                chain = self.catalog().resolve(name, item_type=one)
                return offer_of(chain, name) if kind_of(chain) == kind else None
        return None

    def parameters_of(self, item_id: str, item_type: ItemType | None = None) -> JsonObject:
        """Return the schema for the arguments of an item, empty without one; this does not count as use of it."""
        try:
            return self.catalog().find(item_id, item_type=item_type).manifest.parameters
        except KiwiError:
            return {}

    def unsigned_item(self, item_id: str, item_type: ItemType | None = None) -> UnsignedItem | None:
        """Return a tool that only its author can vouch for: unsigned, and of unknown origin; None for others."""
        try:
            tool = self.catalog().find(item_id, item_type=item_type)
        except KiwiError:
            return None
        is_unsigned = tool.item_type == "tool" and tool.origin.is_editable and tool.signature is None
        is_unknown = is_unsigned and self._services.provenance.of(tool) == "unknown"
        return UnsignedItem.of(tool, "new") if is_unknown else None

    def unsigned_items(self) -> Sequence[UnsignedItem]:
        """Return what is new or changed in the project since it was signed."""
        catalog, found = self.catalog(), list[UnsignedItem]()
        for card in catalog.all(frozenset[Source](("project",))):
            with suppress(KiwiError):  # a broken file is shown by `validate`
                tool = catalog.find(card.identity)
                is_changed = tool.integrity == "modified" or tool.trust == "tampered"
                if is_changed or tool.signature is None:
                    is_models = self._services.provenance.of(tool) == "model_written"
                    state = "changed" if is_changed else "written by a model" if is_models else "new"
                    found.append(UnsignedItem.of(tool, state))
        return found

    def place_of(self, item_id: str) -> Path:
        """Return the file of an item that its author can edit, or its folder."""
        tool = self.catalog().find(item_id)
        if not tool.origin.is_editable:
            raise PolicyDenied(
                f"{tool.id!r} is not in your project or user folder.",
                suggestion=f"`kiwi load {tool.id} --to project` copies it.",
            )
        return tool.origin.root if tool.origin.is_folder else tool.origin.path

    def drop_stale_signature(self, item_id: str) -> None:
        """Remove the signature of an item that its author changed since: it is an unsigned item then."""
        tool = self.catalog().find(item_id)
        if tool.integrity == "modified" or tool.trust == "tampered":
            path = tool.origin.path
            path.with_name(sidecar(path.name)).unlink(missing_ok=True)
            path.write_text(split(path.read_text(encoding="utf-8"), signature_form(path))[1], encoding="utf-8")
            forget_signer(tool.origin.base / LOCK_NAME, tool)

    async def complete(self, item_id: str, argument: str, value: str, known: Mapping[str, str]) -> Sequence[str]:
        """Return what an MCP server proposes for an argument of its prompt or template, of which a part is typed."""
        catalog = self._services.catalogs.for_item(item_id, None)
        try:
            context = self._services.context(self.acting(), catalog)
        except KiwiError:
            return ()
        return await mcp_servers.complete(item_id, context, argument, value, known)

    def task_after(self) -> float:
        """Return for how many seconds a client that could take a task waits for a call instead."""
        return preferences.owner_preferences(self._user).task_after

    def tasks(self) -> Tasks:
        """Return the tasks in the store; opening it may take a while."""
        return self._services.tasks()

    async def index(self, report: Report, *, seconds: float) -> None:
        """Wait at most `seconds` until what was searched is indexed; indexing also continues in the background."""
        await self._services.search.index(report, seconds=seconds)

    def leave(self) -> None:
        """Prepare for the end of this process: threads that are stopped from now on continue in a worker."""
        self._services.is_ending = True

    async def aclose(self) -> None:
        """Release everything the kernel has open."""
        await self._services.aclose()

    async def _pointed(self, error: KiwiError, payload: JsonObject, caller: Caller) -> KiwiError:
        """Return an error with the items that a search for an unknown name finds, and what was not searched."""
        if not isinstance(error, ToolNotFound):
            return error
        if error.is_unknown:
            can_create = self._services.is_owner(caller) or not caller.name or caller.can_author
            # Those spelled nearly so come first, then what a search finds. The caller did not ask for this search, so
            # it leaves no receipt of its own, and its size is not counted.
            place = {"project_path": payload["project_path"]} if payload.get("project_path") else {}
            words = _BETWEEN_WORDS.sub(" ", error.tool_id[:_WORD])
            request: JsonObject = {"query": words, "limit": _SUGGESTED, **place}
            declared = await asyncio.to_thread(find_verb, "search", request)
            found = (await self._response("search", declared, request, caller, None, (), is_read=False)).content
            hits = as_list(found.get("results")) if "note" not in found else []
            names = [as_text(as_object(hit).get("name")) for hit in hits]
            error.suggest([*dict.fromkeys([*error.near, *names])][:_SUGGESTED], can_create=can_create)
            project = as_text(payload.get("project_path")) or self._services.catalogs.project
            if not error.near and can_create and project and is_tool_id(error.tool_id):
                files = sorted((Path(project) / ".ai" / "tools").glob(f"{error.tool_id}.*"))
                if file := next((file for file in files if file.is_file()), None):
                    error.suggestion = f"{file} is there, but declares no item, or cannot be read as code. {_DECLARE}"
        if not self._services.catalogs.project and payload.get("project_path") is None:
            error.suggestion = f"{error.suggestion} What is in a project is found with its `project_path`."
        return error


class _Loads(Protocol):
    async def call(self, verb: str, payload: JsonObject, caller: Caller) -> Answer: ...


async def whole(kernel: _Loads, answer: Answer) -> JsonObject:
    """Return the content of an answer, with the whole of a result that it shows only the beginning of."""
    handle = as_text(answer.content.get("result_handle"))
    if not handle:
        return answer.content
    pages: list[str] = []
    offset: Json = 0
    while isinstance(offset, int) and len(pages) < _PAGES:
        page = await kernel.call("load", {"item_type": "output", "item_id": handle, "offset": offset}, NO_CALLER)
        pages.append(as_text(page.content.get("content")))
        offset = page.content.get("next_offset")
    text = "".join(pages)
    rest = {word: value for word, value in answer.content.items() if not word.startswith("result_")}
    try:
        return {**rest, "result": json.loads(text)}
    except ValueError:  # a text, which is stored as it is
        return {**rest, "result": text}


def _refuse_unknown(verb: str, payload: JsonObject) -> NoReturn:
    """Refuse a payload that names no verb."""
    known = BY_NAME.get(verb)
    if known is None:
        raise VerbNotFound(verb, verbs=list(BY_NAME))
    action = str(payload.get("action"))
    actions = [*known.verbs]
    fix = f"{did_you_mean(action, actions)}Use one of: {', '.join(actions)}."
    raise invalid(verb, [Issue("action", f"there is no {action[:60]!r}", fix)])


def _refusal(error: KiwiError, verb: str, payload: JsonObject) -> Answer:
    # The response is text that every surface can write, whatever was sent.
    about = {"action": payload["action"]} if verb == "execute" and payload.get("action") in ACTIONS else {}
    item_type = as_text(payload.get("item_type")).encode(errors="replace").decode()[:_WORD] or "tool"
    return refusal(error, item_type=item_type, about=about)
