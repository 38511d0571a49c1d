"""The prefer verb: what a client sees without searching, shown with its price, and changed by the owner alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kiwi_mcp.domain.errors import InvalidRequest, PolicyDenied
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.offers import Offer, Offers
from kiwi_mcp.kernel.context.advice import Advice
from kiwi_mcp.kernel.context.sent import offer_cost, own_cost
from kiwi_mcp.kernel.offered import names_of
from kiwi_mcp.kernel.offers import Offering
from kiwi_mcp.kernel.private_yaml import rewrite
from kiwi_mcp.kernel.requests import PreferRequest
from kiwi_mcp.policy.preferences import (
    FILE_NAME,
    SECTIONS,
    Layer,
    Section,
    Wishes,
    check_preferences,
    is_pattern,
    owner_preferences,
    wish_issues,
)

_SECTIONS: Mapping[str, Section] = {"tool": "always_send", "prompt": "prompts", "resource": "resources"}
_ALWAYS = "search"
_LINE = 200


def prefer(request: PreferRequest, user: Path, offering: Offering, *, is_owner: bool) -> JsonObject:
    """Answer one request about preferences."""
    if request.action == "list":
        return {"action": "list", "path": str(user / FILE_NAME), **_told(offering.now())}
    if not is_owner:
        typed = f"kiwi prefer {request.action} NAME"
        raise PolicyDenied("Only the owner decides what is always sent.", suggestion=f"Ask them to type `{typed}`.")
    section, word = _SECTIONS[request.kind], (request.name or "").strip()
    if not word:
        raise InvalidRequest("The request names nothing.", suggestion="Send `name`: an item, or a pattern.")
    before = offering.now()
    if request.action == "add":
        _put(user, section, word, request.called, before)
    else:
        _take_out(user, section, word, before)
    after = offering.now()
    sent = _meant(word, section, after)
    is_added = request.action == "add"
    return {
        "action": request.action,
        "status": "preferred" if is_added else "removed",
        "message": _added(word, request, sent) if is_added else _removed(word, sent),
        "path": str(user / FILE_NAME),
        "came": sorted(_names(after) - _names(before)),
        "went": sorted(_names(before) - _names(after)),
        "warnings": [notice for notice in after.notices if notice not in before.notices],
    }


def suggested(advice: Sequence[Advice]) -> JsonObject:
    """Return what to send always and what to send no longer, as the answer to a request for it."""
    many = f"{len(advice)} change{'s' * (len(advice) != 1)}" if advice else "Nothing"
    message = f"{many} would save tokens{'' if advice else ', as far as is known'}"
    return {"action": "suggest", "message": message, "suggestions": [one.to_json() for one in advice]}


def _put(user: Path, section: Section, word: str, called: str | None, offers: Offers) -> None:
    """Write that something is sent, under a name that is free."""
    value: Json = {"as": called} if called else True
    if issues := [*wish_issues(section, word, value)]:
        told = "; ".join(f"{issue.place} {issue.reason}" for issue in issues)
        raise InvalidRequest(f"{told}.", suggestion=issues[0].fix, issues=[issue.to_json() for issue in issues])
    holder = next((offer for offer in _of_section(offers, section) if offer.name == called), None)
    is_own = section == "always_send" and called in offers.meta_tools
    if is_own or (holder is not None and not _is_called(word, holder)):
        whose = holder.identity.partition("@")[0] if holder else "Kiwi's own tool"
        message = f"The name `{called}` is taken, by {whose}."
        raise InvalidRequest(message, suggestion="Choose another name for `as`; nothing was changed.")
    _rewrite(user, section, lambda entries: entries.update({word: value}))


def _added(word: str, request: PreferRequest, sent: Sequence[str]) -> str:
    """Say what came of a wish."""
    called = request.called
    if is_pattern(word):
        return f"What fits `{word}` is sent from now on"
    if not sent:
        return f"`{word}` is noted; it is sent once there is such a {request.kind} that can be used"
    if called and called not in sent:
        return f"`{word}` is noted, and sent as `{sent[0]}` all the same: a fuller entry of yours decides on its name"
    return f"`{word}` is sent from now on" + (f", as `{called}`" if called else "")


def _take_out(user: Path, section: Section, word: str, offers: Offers) -> None:
    """Take out the entry of that name, or those of the item; what a pattern or the default sends is switched off."""
    if section == "always_send" and word == _ALWAYS:
        message = f"`{_ALWAYS}` is always sent: without it a model could find nothing that is not sent to it."
        raise InvalidRequest(message, suggestion="Leave it; it costs little.")
    names = _names_meant(word, _of_section(offers, section))
    wishes = owner_preferences(user).wishes(section)
    written = [*wishes.owner.names.values(), *wishes.owner.patterns]
    exact = [wish for wish in written if wish.word == word]
    gone = {wish.word for wish in exact or written if exact or wish.word.partition("@")[0] in names}
    rest = Wishes(Layer.of(wish for wish in written if wish.word not in gone), wishes.product)
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


def _removed(word: str, sent: Sequence[str]) -> str:
    """Say what came of a wish that was taken back."""
    if is_pattern(word):
        return f"The entry `{word}` is gone"
    if sent:
        return f"The entry `{word}` is gone; another one, or the default, sends `{sent[0]}` all the same"
    return f"`{word}` is no longer sent; it is found by searching"


def _meant(word: str, section: Section, offers: Offers) -> Sequence[str]:
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
    rewrite(user / FILE_NAME, section, change, check=lambda: check_preferences(user))


def _names_meant(word: str, offers: Iterable[Offer]) -> Sequence[str]:
    """Return all names of the item that a word means, the fullest first: by its own names, or as clients call it."""
    for offer in offers:
        if word == offer.name or word in _own_names(offer):
            return _own_names(offer) or [word]
    return [word]


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


def _told(offers: Offers) -> JsonObject:
    rows = {section: [_row(offer) for offer in _of_section(offers, section)] for section in SECTIONS}
    return {
        "meta_tools": list(offers.meta_tools),
        "meta_tool_tokens": {name: own_cost(name).tokens for name in offers.meta_tools},
        "tools": rows["always_send"],
        "prompts": rows["prompts"],
        "resources": rows["resources"],
        "tokens": sum(offer_cost(offer).tokens for offer in offers.tools),
        "notices": list(offers.notices),
    }


def _row(offer: Offer) -> JsonObject:
    line = offer.description.partition("\n")[0][:_LINE] or offer.title
    told: dict[str, Json] = {"name": offer.name, "description": line, "tokens": offer_cost(offer).tokens}
    return {**told, "identity": offer.identity} if offer.identity else told
