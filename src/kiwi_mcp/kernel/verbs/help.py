"""help: one page about how Kiwi is used, with worked examples."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

from kiwi_mcp.domain.errors import TopicNotFound
from kiwi_mcp.domain.items import SOURCE_TRAITS
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.tool_list import help_folder, help_topics
from kiwi_mcp.kernel.verb import ANYONE, AnyJson, Argument, LongText, NameText, Request, Response, verb
from kiwi_mcp.kernel.view import Data, Notice, ViewItem

# Each is a request as a client sends it.
_EXAMPLE = re.compile(r"^```json\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ALIASES = {
    "tools": "tool",
    "run": "execute",
    "sign": "execute",
    **dict.fromkeys(("publish", "pull", "versions", "diff", "yank", "deprecate", "rollback", "verify"), "registry"),
    **dict.fromkeys(("list", "push", "remote", "remotes", "namespace", "namespaces", "visibility"), "registry"),
    **dict.fromkeys(("gateway", "token", "tokens"), "up"),
    "runtime": "runtimes",
    "error": "errors",
    "": "overview",
}


class HelpRequest(Request, frozen=True, kw_only=True):
    """Which page to read."""

    topic: Annotated[
        NameText | None, Argument("tool, search, load, execute, create, runtimes, api, errors …", "TOPIC")
    ] = None
    project_path: LongText | None = None


class HelpResponse(Response, frozen=True, kw_only=True):
    """One page of help, and what is installed here."""

    help: str
    topic: str
    examples: list[AnyJson]
    topics: list[str]
    installation: dict[str, AnyJson]

    def may_be_followed(self) -> bool:
        """Whether a model may follow it: these pages ship with Kiwi."""
        return True


def _view(response: HelpResponse) -> Iterator[ViewItem]:
    yield Data(response.help.rstrip())
    yield Notice(f"topics: {', '.join(response.topics)}")


@verb("help", access=ANYONE, records=False, shows=_view)
async def explain(request: HelpRequest, context: VerbContext) -> HelpResponse:
    """Show how Kiwi is used, by topic."""
    services = context.services
    word = (request.topic or "").strip().lower()
    name = _ALIASES.get(word, word)
    if name not in help_topics():
        raise TopicNotFound(word[:100], topics=help_topics())
    text = page(name)
    notices = (await services.offers(request.project_path)).notices  # what the owner prefers and is not available here
    # What is installed here: how many items of each type and source, and what is built in.
    catalog = services.catalogs.at(request.project_path)
    entries = catalog.all()
    installed = {
        "items_by_source": dict(Counter(entry.source for entry in entries)),
        "items_by_type": dict(Counter(entry.tool_type for entry in entries)),
        "built_in": sorted(entry.tool_id for entry in entries if SOURCE_TRAITS[entry.source].is_built_in),
        "broken": len(catalog.broken()),
    }
    return HelpResponse(
        help=text,
        topic=name,
        examples=[json.loads(found) for found in _EXAMPLE.findall(text)],
        topics=[*help_topics()],
        installation={**installed, **({"notices": list(notices)} if notices else {})},
    )


def page(name: str) -> str:
    """Return the text of a page."""
    return (help_folder() / f"{name}.md").read_text(encoding="utf-8")
