"""The kernel: every verb, answered; where the parts are joined."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from pydantic import ValidationError

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Call, Space
from kiwi_mcp.domain.errors import Internal, InvalidRequest, KiwiError, VerbNotFound
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.outcome import Report, silent
from kiwi_mcp.kernel.answers import Answer, planned, ran, refusal
from kiwi_mcp.kernel.authoring import Author
from kiwi_mcp.kernel.doctor import examine
from kiwi_mcp.kernel.find import find
from kiwi_mcp.kernel.help import explain
from kiwi_mcp.kernel.init import lay_out
from kiwi_mcp.kernel.load import load
from kiwi_mcp.kernel.pipeline import close_drivers, execute, prepare
from kiwi_mcp.kernel.places import cache_folder, project_space, user_space
from kiwi_mcp.kernel.requests import (
    ACTIONS,
    DoctorRequest,
    ExecuteRequest,
    HelpRequest,
    InitRequest,
    LoadRequest,
    Request,
    SearchRequest,
)
from kiwi_mcp.kernel.verbs import BY_NAME
from kiwi_mcp.kernel.why import explain_call
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.policy.owner import owner_policy

_log = logging.getLogger("kiwi")
_SPACES_KEPT = 32
_WORD = 100


class Kernel:
    """Answers every verb for one user: `await kernel.call("execute", {...})`.

    `project` is the project of requests that name none; without it they must.
    """

    def __init__(self, project: Path | None = None, *, user: Path | None = None, cache: Path | None = None) -> None:
        self._project = project
        self._user = user or user_space()
        self._cache = cache or cache_folder()
        self._catalogs: dict[Space, Catalog] = {}

    async def call(self, verb: str, payload: JsonObject, report: Report = silent) -> Answer:
        """Answer one verb. Refusals are answers too; only cancellation passes through."""
        # What is said back is text that every surface can write, whatever was sent.
        about = {"action": payload["action"]} if verb == "execute" and payload.get("action") in ACTIONS else {}
        item_type = as_text(payload.get("item_type")).encode(errors="replace").decode()[:_WORD] or "tool"
        try:
            return await self._answer(read_request(verb, payload), report)
        except KiwiError as error:
            return refusal(error, item_type=item_type, about=about)
        except Exception:  # noqa: BLE001 - the kernel's edge: a fault of ours is an incident, not a traceback
            incident = secrets.token_hex(6)
            _log.exception("incident %s in %s", incident, verb)
            return refusal(Internal(incident), item_type=item_type, about=about)

    async def aclose(self) -> None:
        """Let go of everything the kernel holds open."""
        self._catalogs.clear()
        await close_drivers()

    async def _answer(self, request: Request, report: Report) -> Answer:
        match request:
            case SearchRequest():
                return Answer(find(request, self._catalog(request.project_path)))
            case LoadRequest():
                return Answer(load(request, self._catalog(request.project_path)))
            case ExecuteRequest():
                return await self._execute(request, report)
            case HelpRequest():
                return Answer(explain(request.topic, self._catalog_if_any(request.project_path)))
            case InitRequest():
                return Answer(lay_out(self._space(request.project_path)))
            case DoctorRequest():
                health = examine(self._catalog(request.project_path))
                return Answer(health, exit_code=1 if health["status"] == "problem" else 0)
            case _:
                raise TypeError(type(request))

    async def _execute(self, request: ExecuteRequest, report: Report) -> Answer:
        catalog = self._catalog(request.project_path)
        if request.action in {"run", "why"}:
            call = self._call(request, catalog)
            grant = owner_policy(self._user).grant
            if request.action == "why":
                return Answer(explain_call(call, catalog, grant))
            if request.dry_run:
                return planned(prepare(call, catalog, grant))
            return ran(await execute(call, catalog, grant, report), item_type=request.item_type)
        return await Author(catalog, report).act(request)

    def _call(self, request: ExecuteRequest, catalog: Catalog) -> Call:
        if not request.item_id:
            issue = Issue("item_id", "is missing", "Name the item to run.")
            raise InvalidRequest("The request names no item.", suggestion=issue.fix, issues=[issue.to_json()])
        parameters: JsonObject = request.parameters  # type: ignore[assignment]  # JSON came in, so JSON it is
        return Call(request.item_id, catalog.space, parameters, is_frozen=request.frozen)

    def _space(self, project_path: str | None) -> Space:
        return project_space(project_path, self._project, user=self._user, cache=self._cache)

    def _catalog(self, project_path: str | None) -> Catalog:
        space = self._space(project_path)
        catalog = self._catalogs.pop(space, None) or Catalog(space)
        self._catalogs[space] = catalog  # the newest stands last, so the first is the one unused for longest
        if len(self._catalogs) > _SPACES_KEPT:
            del self._catalogs[next(iter(self._catalogs))]
        return catalog

    def _catalog_if_any(self, project_path: str | None) -> Catalog | None:
        return self._catalog(project_path) if project_path or self._project else None


def read_request(verb: str, payload: JsonObject) -> Request:
    """Return the request of a verb, or refuse it with every fault that its words have."""
    known = BY_NAME.get(verb)
    if known is None:
        raise VerbNotFound(verb, verbs=list(BY_NAME))
    try:
        return known.request.model_validate(payload)
    except ValidationError as error:
        issues = [_issue(fault["loc"], fault["msg"], known.request) for fault in error.errors(include_url=False)]
        raise InvalidRequest(
            f"`{verb}` cannot be asked like this: " + "; ".join(f"{i.place}: {i.reason}" for i in issues) + ".",
            suggestion=issues[0].fix,
            issues=[issue.to_json() for issue in issues],
        ) from error


def _issue(place: tuple[int | str, ...], reason: str, request: type[Request]) -> Issue:
    name = ".".join(str(part) for part in place)
    words = list(request.model_fields)
    if name not in words and len(place) == 1:
        fix = did_you_mean(name, words).strip() or f"The verb's words are: {', '.join(words)}."
        return Issue(name, "is not a word of this verb", fix)
    told = reason[:1].lower() + reason[1:]
    return Issue(name, told, f"Send `{name}` otherwise: its {told}." if "should" in told else f"Send `{name}`.")
