"""doctor: what works here, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from kiwi_mcp import __version__
from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.release import unseeded
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.cards import Card
from kiwi_mcp.domain.errors import IsolationUnavailable, KiwiError
from kiwi_mcp.domain.isolation import LEVELS, Level
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import SOURCE_TRAITS
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.mcp import Offers
from kiwi_mcp.drivers.environments.packages import server_package
from kiwi_mcp.drivers.sandboxed import backend_reports, known_backend_reports
from kiwi_mcp.kernel.context import Services, VerbContext
from kiwi_mcp.kernel.memory import MemoryMove
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.kernel.settings import named_half, search_mode
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.threads.start import unknown_provider
from kiwi_mcp.kernel.token_meter import context_report
from kiwi_mcp.kernel.verb import ANYONE, AnyJson, ProjectRequest, Response, verb
from kiwi_mcp.kernel.verbs.mcp.servers import all_servers
from kiwi_mcp.kernel.verbs.prefer import advice
from kiwi_mcp.kernel.verbs.schedule import due_warnings
from kiwi_mcp.kernel.verbs.search import SOURCES, card_sources, open_indexes
from kiwi_mcp.kernel.verbs.why import holds
from kiwi_mcp.kernel.view import Data, ViewItem, count_text
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.home_config import FILE_NAME as CONFIG
from kiwi_mcp.manifest.home_config import home_config, memory_folder
from kiwi_mcp.manifest.runtime import RuntimeConfig, runtime_config
from kiwi_mcp.manifest.templates import defaulted, variables
from kiwi_mcp.manifest.trust import FILE_NAME as TRUST_FILE
from kiwi_mcp.manifest.trust import owner_trust
from kiwi_mcp.memory.files import list_files, read_bytes
from kiwi_mcp.policy.policy_files import FILE_NAME, deployments, minimum, owner_policy
from kiwi_mcp.policy.preferences import owner_preferences
from kiwi_mcp.policy.secret_access import stored_secrets, vault_folder
from kiwi_mcp.primitives.process.spawn import search_path
from kiwi_mcp.primitives.secrets.key_storage import SEALS, has_keyring, sealed_by
from kiwi_mcp.primitives.secrets.reveal import Variables
from kiwi_mcp.sandbox.backend import BackendReport, choose
from kiwi_mcp.sandbox.levels import floor
from kiwi_mcp.search.encoder import encoder_state

_PLUMBING = frozenset(
    {"command", "args", "argv", "cwd", "url", "base_url", "host", "hosts", "port", "socket", "mcpServers"}
)
"""Keys that say how a tool is started or reached, or where it is."""
_DECLARED = ("parameters", "inputs", "outputs", "properties")
"""Keys below which an item names its own parameters."""
_COMMON = (
    f"what ships with Kiwi runs as you, what you or a model wrote is {floor('owner_written')}, what is of unknown "
    f"origin is {floor('unknown')}"
)
_UNTESTED = "whether this machine can give that was not tested yet; the first tool does so"


def tell_isolation(space: Space) -> str:
    """Return how tools are isolated, from earlier results; nothing is started to learn more."""
    known = known_backend_reports(space)
    reached = [_reached(level, known)[0] for level in LEVELS if level != "trusted"] if known else [_UNTESTED]
    return f"{_COMMON}: {'; '.join(reached)}"


def _reached(level: Level, known: Sequence[BackendReport]) -> tuple[str, str]:
    """Return how processes are isolated at a level, and what to do if this machine cannot do that."""
    try:
        backend = choose(level, known).backend
    except IsolationUnavailable as refused:
        return f"{level} is refused ({refused.suggestion})", refused.suggestion
    return f"{level} by {backend.name}" + (f" with limits by {backend.limited_by}" if backend.limited_by else ""), ""


_COUNTED = 200_000
_LISTED = 20
_MOST_FIXES = 10
_ABSENT = "No tool named"
_WAITING = frozenset({"changed", "new"})
_WEIGHT = {"ok": 0, "warning": 1, "problem": 2}
_UNASKED: JsonObject = {}
_MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}


class DoctorResponse(Response, frozen=True, kw_only=True):
    """Every check with its status, and the worst status."""

    status: str
    version: str
    checks: list[dict[str, AnyJson]]
    context: dict[str, AnyJson]

    def exit_status(self) -> int:
        """Return 1 for a problem."""
        return 1 if self.status == "problem" else 0


def _view(response: DoctorResponse) -> Iterator[ViewItem]:
    for check in response.checks:
        yield Data(f"{_MARKS[check['status']]} {check['check']}: {check['detail']}")
        if fix := check.get("fix"):
            yield Data(f"    fix: {fix}")


@verb("doctor", access=ANYONE, records=False, everyday="doctor", shows=_view)
async def doctor(request: ProjectRequest, context: VerbContext) -> DoctorResponse:
    """Check this installation: what works, what is missing, and how to get it."""
    services, project = context.services, request.project_path
    catalogs = services.catalogs
    offers = await services.offers(project)
    servers = await _servers(project, context)
    await backend_reports(catalogs.space(project))  # tests the machine, unless that was done before
    suggestions = await advice(project, context) if context.is_owner else None
    search = await catalogs.far.do(catalogs.space(project), partial(search_status, services))
    report = context_report(offers, services.response_sizes, suggestions)
    response = examine(catalogs.of(project), services.store, offers, servers, report, search)
    try:
        has_store = context.is_owner and services.store.registry_if_any() is not None
        found = await due_warnings(services) if has_store else []
    except KiwiError:  # the store has a check of its own
        return response
    if not found:
        return response
    detail, _, fix = found[0].partition(": ")
    worst = max(response.status, "warning", key=_WEIGHT.__getitem__)
    check = dict(_check("worker", detail, "warning", fix))
    return replace(response, status=worst, checks=[*response.checks, check])


async def _servers(project: str | None, context: VerbContext) -> Sequence[JsonObject]:
    """Return the MCP servers as a list shows them; a store that cannot be read is reported separately."""
    catalogs, rights = context.services.catalogs, context.services.rights(context.caller)
    try:
        response = await catalogs.near.do(
            catalogs.space(project),
            lambda catalog: all_servers(catalog, catalogs.definitions(), ItemVisibility(catalog, rights)),
        )
    except KiwiError:
        return ()
    return [as_object(server) for server in as_list(response.to_json().get("servers"))]


def examine(
    catalog: Catalog,
    store: Store,
    offers: Offers,
    servers: Sequence[JsonObject] = (),
    context: JsonObject = _UNASKED,
    search: str = "",
) -> DoctorResponse:
    """Return every check with its state, and the worst of them.

    `servers` are the MCP servers, as a list shows them; `context` is the report of what a model is given; `search` says
    how items are found, and how far the index is.
    """
    space = catalog.space
    checks = [
        _check("kiwi", f"{__version__}, MCP SDK {version('mcp')}"),
        _check("python", f"{platform.python_version()} ({sys.executable})"),
        *_isolation(catalog, store),
        *_folders(space),
        *_cache(space.cache),
        *_or_problem("policy", _policy(space.user)),
        *_or_problem(CONFIG, _environment(catalog)),
        *_or_problem("deployment", _deployment(catalog)),
        *_preferences(space.user, offers),
        *_context(context),
        *_or_problem("secrets", _secrets(space.user)),
        *_or_problem("keys", _keys(space.user)),
        *_or_problem("store", _store(store)),
        *_search(search),
        *_runtimes(catalog),
        *(check for server in servers for check in _server(server, catalog)),
        *_items(catalog),
    ]
    worst = max((str(check["status"]) for check in checks), key=_WEIGHT.__getitem__)
    return DoctorResponse(
        status=worst, version=__version__, checks=[dict(check) for check in checks], context=dict(context)
    )


def _check(name: str, detail: str, status: str = "ok", fix: str = "") -> JsonObject:
    response: dict[str, Json] = {"check": name, "status": status, "detail": detail}
    return {**response, "fix": fix} if fix else response


def _problem(name: str, error: KiwiError) -> JsonObject:
    """Return the check that an error failed, with the fix of each of its issues if it has any."""
    issues = map(as_object, as_list(error.details.get("issues")))
    fixes = dict.fromkeys(
        f"{as_text(one.get('place'))}: {as_text(one.get('fix'))}".removeprefix(": ") for one in issues
    )
    fix = " ".join([*fixes][:_MOST_FIXES]) or error.suggestion
    return _check(name, error.message, "problem", fix)


def _or_problem(name: str, checks: Iterator[JsonObject]) -> Iterator[JsonObject]:
    try:
        yield from checks
    except KiwiError as error:
        yield _problem(name, error)


def _isolation(catalog: Catalog, store: Store) -> Iterator[JsonObject]:
    # What to do where this machine is known to have no sandbox, so that no tool of the owner's own runs.
    known = known_backend_reports(catalog.space)
    _, fix = _reached(floor("owner_written"), known) if known else ("", "")
    yield _check("isolation", tell_isolation(catalog.space), "problem" if fix else "ok", fix)
    try:
        authors = store.authors_if_any()
        relaxed = [one for one in authors.relaxations() if holds(one, catalog)] if authors else []
    except KiwiError:  # that the store cannot be read has a line of its own
        return
    for one in relaxed:
        response = f"{one.identity} runs under {one.level} since {one.at[:10]}{f': {one.reason}' if one.reason else ''}"
        fix = f"`kiwi relax {one.identity.partition('@')[0]} --undo` holds it as its origin says again."
        yield _check("relaxed", response, "warning", fix)


def _folders(space: Space) -> Iterator[JsonObject]:
    for name, path in (("user space", space.user), ("cache", space.cache), ("project", space.project_ai)):
        nearest = next(folder for folder in (path, *path.parents) if folder.exists())
        if os.access(nearest, os.W_OK):
            yield _check(name, str(path) if path.exists() else f"{path} (made when needed)")
        else:
            yield _check(name, f"{path} cannot be written", "problem", f"Give yourself write access to {nearest}.")


def _cache(cache: Path) -> Iterator[JsonObject]:
    files = (Path(folder) / name for folder, _, names in os.walk(cache) for name in names)
    counted = list(islice((file.lstat().st_size for file in files), _COUNTED))
    more = "more than " if len(counted) == _COUNTED else ""
    size = f"{more}{sum(counted) / 1_000_000:,.0f} MB"
    yield _check("cache size", f"{size} of copies, environments and builds; {cache} can be deleted at any time")


def _policy(user: Path) -> Iterator[JsonObject]:
    grant = owner_policy(user).grant
    granted = ", ".join(grant.hosts.allow) or "public addresses only"
    yield _check(
        "policy", f"{user / FILE_NAME}: hosts: {granted}; denied items: {', '.join(grant.items.deny) or 'none'}"
    )


def _environment(catalog: Catalog) -> Iterator[JsonObject]:
    user = catalog.space.user
    chosen, root = home_config(user), memory_folder(user)
    if chosen.provider_adapter:
        try:
            catalog.find(chosen.provider_adapter)
        except KiwiError:
            yield {**_problem(CONFIG, unknown_provider(chosen.provider_adapter)), "status": "warning"}
    if chosen.auth_mode == "locked":
        fix = f"Remove `auth_mode` from {user / CONFIG} when items shall run again."
        yield _check(CONFIG, "auth_mode is locked: no item runs", "warning", fix)
    beside = 0
    with suppress(OSError):  # a folder that cannot be read
        beside = sum(step.what == "move" for step in MemoryMove(user, root).there())
    older = f"; {beside} files of yours are still beside it: `kiwi memory migrate` moves them" if beside else ""
    yield _check("memory", f"{root}{'' if root.exists() else ' (made when needed)'}{older}")
    for place in islice(_plumbing(root), _LISTED):
        fix = "Tools, servers and providers belong below `tools`, `servers` and `providers` of your user folder."
        yield _check("memory", f"{place}, which is no part of a memory", "warning", fix)


def _plumbing(root: Path) -> Iterator[str]:
    """Yield where files of the memory say how a tool is started or reached, or where it is."""
    with suppress(KiwiError):
        for entry in map(as_object, as_list(list_files(root, "", is_recursive=True)["entries"])):
            path = as_text(entry["path"])
            if entry["type"] == "file" and path.endswith((".md", ".yaml", ".yml", ".json")):
                with suppress(KiwiError, UnicodeDecodeError):
                    yield from (f"{path} has `{key}`" for key in _plumbing_keys(path, read_bytes(root, path).decode()))


def _plumbing_keys(path: str, text: str) -> list[str]:
    """Return the keys of a file, or of the head of a text, that belong to tools, servers and providers."""
    if path.endswith(".md"):
        _, _, text = text.partition("---\n") if text.startswith("---\n") else ("", "", "")
        text = text.partition("\n---")[0]
    found, waiting = list[str](), [read_yaml(text, what=path).value]
    for value in waiting:
        found += [key for key in as_object(value) if key in _PLUMBING]
        waiting += [inner for key, inner in as_object(value).items() if key not in _DECLARED]
        waiting += as_list(value)
    return found


def _secrets(user: Path) -> Iterator[JsonObject]:
    folder = vault_folder(user)
    way = sealed_by(folder.parent)
    if not folder.is_dir():
        yield _check("secrets", "none are kept; `kiwi secrets set NAME` keeps the first one")
        return
    response = f"{folder}, opened by the {SEALS[way]}"
    if way == "keyring" and not has_keyring():
        fix = "Start Kiwi in a session with a keyring, and with its extra `keyring` installed."
        yield _check("secrets", f"{response}, and there is no keyring here", "problem", fix)
        return
    is_better = way == "file" and has_keyring()
    yield _check(
        "secrets", f"{response}{'; `kiwi secrets seal keyring` would keep its key safer' if is_better else ''}"
    )


def _keys(user: Path) -> Iterator[JsonObject]:
    """Report the keys that are trusted, if there are any."""
    trusted = owner_trust(user / TRUST_FILE)
    if trusted.own or trusted.publishers:
        response = f"{len(trusted.own)} of your own; {len(trusted.publishers)} publishers are known by theirs"
        yield _check("keys", response)


def _deployment(catalog: Catalog) -> Iterator[JsonObject]:
    """Report a managed machine: how it isolates processes, and which items that are here are not on its list."""
    if not deployments():
        return
    least = minimum()
    yield _check("deployment", f"managed: every process runs at least at {least}" if least else "managed")
    permission = ItemVisibility(catalog)
    here = (entry.identity for entry in catalog.all(("project", "user")))
    for identity in islice((one for one in here if permission.is_hidden(one)), _LISTED):
        fix = "Ask the administrator of this machine to add it to the list, or remove it."
        yield _check("deployment", f"{identity} is not loaded: it is not on the list", "warning", fix)


def _preferences(user: Path, offers: Offers) -> Iterator[JsonObject]:
    if fault := owner_preferences(user).fault:
        yield _problem("preferences", fault)
    chosen = count_text(len(offers.tools), "always-sent tool")
    texts = f"{count_text(len(offers.prompts), 'prompt')}, {count_text(len(offers.resources), 'resource')}"
    yield _check("preferences", f"clients see {', '.join(offers.meta_tools)} and {chosen}, {texts}")
    # What is preferred for all projects need not be in this one.
    absent = [notice for notice in offers.notices if _ABSENT in notice]
    absent = absent if len(absent) > 1 else []
    for notice in (notice for notice in offers.notices if notice not in absent):
        yield _check("preferences", notice, "warning", "`kiwi prefer` shows what clients see.")
    if absent:
        names = ", ".join(notice.partition(" is not sent")[0] for notice in absent[:_MOST_FIXES])
        response = f"{len(absent)} of what you prefer is not here, and perhaps in another project: {names}"
        fix = "`kiwi prefer` says more of each; `kiwi prefer remove NAME` is for what is nowhere."
        yield _check("preferences", f"{response}{', …' if absent[_MOST_FIXES:] else ''}", "warning", fix)


def _context(context: JsonObject) -> Iterator[JsonObject]:
    if summary := as_text(context.get("summary")):
        yield _check("context", summary)
    for one in map(as_object, as_list(context.get("suggestions"))):
        response = f"{as_text(one.get('name'))} was {as_text(one.get('why'))}"
        yield _check("context", response, fix=f"`{as_text(one.get('command'))}`")


def _store(store: Store) -> Iterator[JsonObject]:
    registry = store.registry()
    yield _check("store", f"{registry.database.url}: {registry.count()} versions, as {store.actor.name}")
    for name in unseeded(registry):
        response = f"{name} here is not the one that ships with Kiwi"
        yield _check("store", response, "warning", "It is never run; ask who writes to this store.")
    for doubt in registry.database.doubts():
        yield _check("store", doubt, "warning", "Install `pysqlite3`, which brings a newer SQLite.")


def _search(message: str) -> Iterator[JsonObject]:
    issues: list[Issue] = []
    named_half(issues)
    for issue in issues:
        yield _check("search", f"{issue.place} {issue.reason}, so it is ignored", "problem", issue.fix)
    if not message:
        return
    is_lame = message.startswith("words only:")
    fix = "Install Kiwi anew: what is like a request only in its meaning is not found." if is_lame else ""
    yield _check("search", message, "warning" if is_lame else "ok", fix)


def _runtimes(catalog: Catalog) -> Iterator[JsonObject]:
    # Whatever can stand below another item may start a program, and lack it.
    links = {kind for sheet in catalog.sheets.by_type.values() for kind in sheet.executor_types}
    for entry in (entry for entry in catalog.all() if entry.tool_type in links):
        try:
            tool = catalog.find(entry.identity)
            words = runtime_config(tool)
        except KiwiError as error:
            yield _problem(entry.tool_id, error)
            continue
        if not tool.manifest.config.get("command") or not words.command:
            continue
        program = _program(words, entry, catalog)
        if not program:
            yield _check(entry.tool_id, f"what `{words.command[0]}` would fetch is installed by Kiwi")
        elif found := shutil.which(program, path=search_path()):
            yield _check(entry.tool_id, found)
        else:
            missing = f"`{program}` is not on the PATH"
            yield _check(entry.tool_id, missing, "warning", words.install or f"Install {program}.")


def _program(words: RuntimeConfig, entry: Card, catalog: Catalog) -> str:
    """Return the program that an item lacks if it is not on the PATH; empty where all that it takes comes with Kiwi."""
    command, *args = words.command
    is_server = catalog.sheets.is_server(entry.tool_type)
    found = server_package(command, args, catalog.space.cache) if is_server else None
    if found is None:
        return command
    package, _ = found
    return "" if package.kind == "python" else "node" if package.pin else "npm"


def _server(server: JsonObject, catalog: Catalog) -> Iterator[JsonObject]:
    """Give one line on an MCP server: whether it could be asked, what waits for its owner, and what it lacks."""
    name, status, states = as_text(server.get("server")), as_text(server.get("status")), as_object(server.get("states"))
    counted = ", ".join(f"{text_of(count)} {state}" for state, count in states.items()) or "nothing offered"
    missing = [*_unset(as_text(server.get("identity")), catalog)]
    said = [f"{status}: {counted}", as_text(server.get("fault")).partition("\n")[0]]
    said += [as_text(server.get("notice")), f"not set: {', '.join(missing)}" if missing else ""]
    waits = status == "changed" or not _WAITING.isdisjoint(states)
    fixes = [
        f"Set {', '.join(missing)} in the environment or in .env." if missing else "",
        f"`kiwi mcp diff {name}`, then `kiwi mcp accept {name}`." if waits else "",
        f"`kiwi mcp refresh {name}` asks it again." if status in {"down", "never asked"} else "",
    ]
    fix = " ".join(filter(None, fixes))
    response = "; ".join(filter(None, said))
    yield _check(f"MCP server {name}", response, "warning" if fix else "ok", fix)


def _unset(identity: str, catalog: Catalog) -> Iterator[str]:
    """Yield the variables that a server needs and that are not set."""
    try:
        templates: Json = [catalog.find(identity).manifest.config]
        names, spare = variables(templates), defaulted(templates)
        stored = stored_secrets(names, catalog.space.user)
        found = Variables().locate(names, project=catalog.space.project, user=catalog.space.user)
    except KiwiError:  # it has a line of its own among the items
        return
    yield from (f"${{{name}}}" for name, place in found.items() if place is None and name not in {*stored, *spare})


def _items(catalog: Catalog) -> Iterator[JsonObject]:
    entries = catalog.all()
    own = [entry for entry in entries if not SOURCE_TRAITS[entry.source].is_built_in]
    yield _check("items", f"{len(own)} of your own, {len(entries) - len(own)} built in")
    for issue in catalog.sheets.issues:
        yield _check(f"type sheet {issue.place}", issue.reason, "problem", issue.fix)
    for broken in catalog.broken():
        yield _problem(broken.path, broken.error)
    for name in sorted({entry.tool_id for entry in own}):
        try:
            hidden = catalog.shadows(catalog.find(name))
            drift = catalog.resolve(name).drift
        except KiwiError as error:
            yield _problem(name, error)
            continue
        for sentence in hidden:
            yield _check(name, sentence, "warning", "Rename one of them, or ask for the full identity.")
        for sentence in drift:
            yield _check(name, sentence, "warning", "Change the manifest, or ask the server anew.")


def search_status(services: Services, catalog: Catalog) -> str:
    """Return how items are found, why only by words if so, and the progress of the index."""
    state = encoder_state() if search_mode(services.user) == "meaning" else "words only, as the owner chose"
    try:
        cards, worded, encoded = open_indexes(services).view(card_sources(catalog, SOURCES["all"])).progress
    except KiwiError as fault:
        return f"{state}; the progress of the index is unknown: {fault.message}"
    by_meaning = f", {encoded:,} by meaning" if state.startswith("words and") else ""
    return f"{state}; of {cards:,} items {worded:,} are found by words{by_meaning}"
