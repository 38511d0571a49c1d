"""prefer: list, suggest, add, remove."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType, field

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.mcp import Offer, Offers
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.token_meter import Advice, advice_for, offer_cost, own_cost
from kiwi_mcp.kernel.tool_names import names_of
from kiwi_mcp.kernel.verb import ANYONE, OWNER, Argument, NameText, Option, ProjectRequest, Response, verb
from kiwi_mcp.kernel.view import Data, Hint, Notice, TableRow, ViewItem, warning_rows
from kiwi_mcp.manifest.home_config import memory_folder
from kiwi_mcp.manifest.owner_file import rewrite
from kiwi_mcp.policy.preferences import (
    PreferenceLayer,
    PreferenceSection,
    Section,
    check_preferences,
    is_pattern,
    owner_preferences,
    preferences_file,
    wish_issues,
)

_SECTIONS: Mapping[str, Section] = {"tool": "always_send", "prompt": "prompts", "resource": "resources"}
_ALWAYS = "search"
_LINE = 200


Kind = Annotated[Literal["tool", "prompt", "resource"], Option("tool, prompt or resource.")]


class SentLine(Response, frozen=True, kw_only=True):
    """Something that clients see without a search, and what it costs."""

    name: str
    description: str
    tokens: int
    identity: str | UnsetType = UNSET


class PreferListResponse(Response, frozen=True, kw_only=True):
    """What every client sees without a search."""

    action: str = "list"
    path: str
    meta_tools: list[str]
    meta_tool_tokens: dict[str, int]
    tools: list[SentLine]
    prompts: list[SentLine]
    resources: list[SentLine]
    tokens: int
    notices: list[str]


def _list_view(response: PreferListResponse) -> Iterator[ViewItem]:
    rows = [("tool", name, response.meta_tool_tokens[name], "Kiwi's own") for name in response.meta_tools]
    for kind, lines in (("tool", response.tools), ("prompt", response.prompts), ("resource", response.resources)):
        for line in lines:
            item = (line.identity or "").partition("@")[0]
            if item or "{" in line.name:  # the pages of help are one row together, that of their addresses
                rows.append((kind, line.name, line.tokens, "  ".join(filter(None, (item, line.description)))))
    width = max(len(name) for _, name, _, _ in rows)
    for kind, name, cost, about in rows:
        yield TableRow(f"{kind:<9} {name.ljust(width)}  {cost:>6}  {about}".rstrip())
    for notice in response.notices:
        yield Notice(f"notice: {notice}")
    yield Notice(f"The tools of your choice cost about {response.tokens} tokens in every conversation.")
    yield Hint("`kiwi prefer add NAME` and `kiwi prefer remove NAME` change this.")


@verb("list", group="prefer", access=ANYONE, records=False, aliases=("prefer",), shows=_list_view)
def list_preferred(request: ProjectRequest, context: VerbContext) -> PreferListResponse:
    """Show the tools, prompts and resources that every client sees, and the cost of the tools."""
    offers = context.services.catalogs.offering(request.project_path).now()
    return PreferListResponse(
        path=str(preferences_file(context.services.user)),
        meta_tools=list(offers.meta_tools),
        meta_tool_tokens={name: own_cost(name).tokens for name in offers.meta_tools},
        tools=[_line(offer) for offer in offers.tools],
        prompts=[_line(offer) for offer in offers.prompts],
        resources=[_line(offer) for offer in _of_section(offers, "resources")],
        tokens=sum(offer_cost(offer).tokens for offer in offers.tools),
        notices=list(offers.notices),
    )


def _line(offer: Offer) -> SentLine:
    return SentLine(
        name=offer.name,
        description=offer.description.partition("\n")[0][:_LINE] or offer.title,
        tokens=offer_cost(offer).tokens,
        identity=offer.identity or UNSET,
    )


class SuggestionLine(Response, frozen=True, kw_only=True):
    """One change that would save tokens, and the command that makes it."""

    action: str
    name: str
    tokens: int
    saves: int
    why: str
    command: str


class PreferSuggestResponse(Response, frozen=True, kw_only=True):
    """Tools to add to the list, and tools to remove."""

    action: str = "suggest"
    message: str
    suggestions: list[SuggestionLine]


def _suggest_view(response: PreferSuggestResponse) -> Iterator[ViewItem]:
    for one in response.suggestions:
        yield TableRow(f"{one.command}  # {one.why}")
    yield Notice(f"{response.message}.")


@verb("suggest", group="prefer", access=OWNER, records=False, shows=_suggest_view)
async def suggest_preferred(request: ProjectRequest, context: VerbContext) -> PreferSuggestResponse:
    """Suggest tools to add to the list and tools to remove, from past use."""
    found = await advice(request.project_path, context)
    count = f"{len(found)} change{'s' * (len(found) != 1)}" if found else "Nothing"
    return PreferSuggestResponse(
        message=f"{count} would save tokens{'' if found else ', as far as is known'}",
        suggestions=[msgspec.convert(one.to_json(), SuggestionLine) for one in found],
    )


async def advice(project_path: str | None, context: VerbContext) -> Sequence[Advice]:
    """Return the tools that the owner could add to the list or remove from it, from past use; for the owner alone."""
    services = context.services
    offers = await services.offers(project_path)
    space = services.catalogs.space_if_any(project_path)
    return await services.catalogs.near.do(
        space, lambda catalog: advice_for(catalog, services.store, offers, services.response_sizes)
    )


class PreferAddRequest(ProjectRequest, frozen=True, kw_only=True):
    """What to show without a search, and under which name."""

    name: Annotated[NameText, Argument("A name, server/name, a full name, or a pattern such as 'github/*'.", "ITEM")]
    called: Annotated[NameText | None, Option("The name under which clients see it.", "--as", metavar="NAME")] = field(
        default=None, name="as"
    )
    kind: Kind = "tool"


class PreferChangeResponse(Response, frozen=True, kw_only=True):
    """What clients see now that they did not see before, and the reverse."""

    action: str
    status: str
    message: str
    path: str
    came: list[str]
    went: list[str]
    warnings: list[str]


def _change_view(response: PreferChangeResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    yield Data(response.message)
    for name in response.came:
        yield Notice(f"  + {name}")
    for name in response.went:
        yield Notice(f"  - {name}")
    yield Notice(f"  path: {response.path}")


@verb("add", group="prefer", access=OWNER, shows=_change_view)
def add_preferred(request: PreferAddRequest, context: VerbContext) -> PreferChangeResponse:
    """Show something to every client without a search."""
    word = _checked(request.name)
    called = request.called
    section = _SECTIONS[request.kind]
    user = context.services.user
    offering = context.services.catalogs.offering(request.project_path)
    before = offering.now()
    value: Json = {"as": called} if called else True
    if issues := [*wish_issues(section, word, value)]:
        response = "; ".join(f"{issue.place} {issue.reason}" for issue in issues)
        raise InvalidRequest(f"{response}.", suggestion=issues[0].fix, issues=[issue.to_json() for issue in issues])
    holder = next((offer for offer in _of_section(before, section) if offer.name == called), None)
    is_own = section == "always_send" and called in before.meta_tools
    if is_own or (holder is not None and not _is_called(word, holder)):
        holder_name = holder.identity.partition("@")[0] if holder else "Kiwi's own tool"
        message = f"The name `{called}` is taken, by {holder_name}."
        raise InvalidRequest(message, suggestion="Choose another name for `as`; nothing was changed.")
    _rewrite(user, section, lambda entries: entries.update({word: value}))
    after = offering.now()
    sent = _sent_names(word, section, after)
    if is_pattern(word):
        message = f"What fits `{word}` is sent from now on"
    elif not sent:
        message = f"`{word}` is noted; it is sent once there is such a {request.kind} that can be used"
    elif called and called not in sent:
        message = (
            f"`{word}` is noted, and sent as `{sent[0]}` all the same: a fuller entry of yours decides on its name"
        )
    else:
        message = f"`{word}` is sent from now on" + (f", as `{called}`" if called else "")
    return _changed("add", "preferred", message, user, before, after)


class PreferRemoveRequest(ProjectRequest, frozen=True, kw_only=True):
    """What to show only after a search."""

    name: Annotated[NameText, Argument("An entry, or an item as `kiwi prefer` shows it.", "ITEM")]
    kind: Kind = "tool"


@verb("remove", group="prefer", access=OWNER, shows=_change_view)
def remove_preferred(request: PreferRemoveRequest, context: VerbContext) -> PreferChangeResponse:
    """Show something only to clients that search for it."""
    word = _checked(request.name)
    section = _SECTIONS[request.kind]
    user = context.services.user
    offering = context.services.catalogs.offering(request.project_path)
    before = offering.now()
    _take_out(user, section, word, before)
    after = offering.now()
    if is_pattern(word):
        message = f"The entry `{word}` is gone"
    elif sent := _sent_names(word, section, after):
        message = f"The entry `{word}` is gone; another one, or the default, sends `{sent[0]}` all the same"
    else:
        message = f"`{word}` is no longer sent; it is found by searching"
    return _changed("remove", "removed", message, user, before, after)


def _checked(name: str) -> str:
    """Return a name without space around it; refuse one that is empty."""
    if not (checked := name.strip()):
        raise InvalidRequest("The request names nothing.", suggestion="Send `name`: an item, or a pattern.")
    return checked


def _changed(action: str, status: str, message: str, user: Path, before: Offers, after: Offers) -> PreferChangeResponse:
    return PreferChangeResponse(
        action=action,
        status=status,
        message=message,
        path=str(preferences_file(user)),
        came=sorted(_names(after) - _names(before)),
        went=sorted(_names(before) - _names(after)),
        warnings=[notice for notice in after.notices if notice not in before.notices],
    )


def _take_out(user: Path, section: Section, word: str, offers: Offers) -> None:
    """Take out the entry of that name, or those of the item; what a pattern or the default sends is switched off."""
    if section == "always_send" and word == _ALWAYS:
        message = f"`{_ALWAYS}` is always sent: without it a model could find nothing that is not sent to it."
        raise InvalidRequest(message, suggestion="Leave it; it costs little.")
    # A word means an item by its own names, of which the fullest comes first, or as clients call it.
    listed = _of_section(offers, section)
    meant = next((offer for offer in listed if word == offer.name or word in _own_names(offer)), None)
    names = (meant and _own_names(meant)) or [word]
    wishes = owner_preferences(user).sections[section]
    written = [*wishes.owner.names.values(), *wishes.owner.patterns]
    exact = [wish for wish in written if wish.word == word]
    gone = {wish.word for wish in exact or written if exact or wish.word.partition("@")[0] in names}
    rest = PreferenceSection(PreferenceLayer.of(wish for wish in written if wish.word not in gone), wishes.product)
    deciding = None if exact and (is_pattern(word) or not exact[0].is_sent) else rest.about(names)
    # What another entry names is meant to be sent; what is merely brought along is not, from now on.
    is_named = bool(exact) and deciding is not None and deciding in rest.owner.names.values()
    is_sent = deciding is not None and deciding.is_sent and not is_named
    if not gone and not is_sent:
        suggestion = "`kiwi prefer` shows what is sent; name an entry, or an item as it is shown there."
        raise InvalidRequest(f"`{word}` is not among what is sent.", suggestion=suggestion)

    def change(entries: dict[str, Json]) -> None:
        for entry in gone:
            entries.pop(entry, None)
        if is_sent:
            entries[names[0]] = False

    _rewrite(user, section, change)


def _sent_names(word: str, section: Section, offers: Offers) -> Sequence[str]:
    """Return the names under which clients see what a word names."""
    if section == "always_send" and word in offers.meta_tools:
        return [word]
    return [offer.name for offer in _of_section(offers, section) if _is_called(word, offer)]


def _is_called(word: str, offer: Offer) -> bool:
    return word == offer.name or word.partition("@")[0] in _own_names(offer)


def _own_names(offer: Offer) -> Sequence[str]:
    """Return the names of an item, the fullest first; none where it is no item."""
    place = offer.identity.partition("@")[0].split("/")
    return names_of(*place) if len(place) == len(("source", "namespace", "name")) else ()


def _rewrite(user: Path, section: Section, change: Callable[[dict[str, Json]], object]) -> None:
    memory_folder(user)  # a folder on a missing disk is not created again
    rewrite(preferences_file(user), section, change, check=lambda: check_preferences(user))


def _of_section(offers: Offers, section: Section) -> Iterable[Offer]:
    match section:
        case "always_send":
            return offers.tools
        case "prompts":
            return offers.prompts
        case "resources":
            return (*offers.resources, *offers.templates)


def _names(offers: Offers) -> set[str]:
    listed = (*offers.tools, *offers.prompts, *offers.resources, *offers.templates)
    return {*offers.meta_tools, *(offer.name for offer in listed)}
