"""Permissions of a directive, as a grant: what a model may use for it. Nothing else is granted.

Four forms are read: `<read>`, `<write>`, `<execute>`, `<deny>` with a `resource` and which of it; `<cap>` with one
word; `<execute>`, `<search>`, `<load>`, `<sign>` with the items in them (`<tool>a.b.*</tool>`, or `*`); and in YAML a
mapping such as `{tools: [web_search]}`. What is not understood is an error: its author would rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from msgspec.structs import replace

from kiwi_mcp.domain.grants import LEFT_TO_OTHERS, Grant, Rules, empty_grant, is_plain
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.names import did_you_mean, use_one_of
from kiwi_mcp.manifest.type_specs import TypeSpecs, load_type_specs

_Given = Mapping[str, Sequence[str]]
"""Patterns under the names of the fields of a grant."""
_ACTIONS = ("read", "write", "execute")
_NESTED = ("execute", "search", "load", "sign")
"""Elements that hold the items that they are about."""
_KINDS = ("tool", "directive", "knowledge", "skill")
_TAGS = (
    *_ACTIONS, "deny", "cap", "orchestration", "knowledge", "directives", "shell", "env", "search", "load", "sign",
    "acknowledge", "all",
)  # fmt: skip
_ATTRIBUTES = (
    "resource", "path", "id", "tool_id", "tool_type", "action", "actions", "commands", "endpoint", "var", "vars",
    "module", "name", "allow_categories", "allow_directives", "deny_directives", "scope", "delegate",
)  # fmt: skip
_USE = ("execute.run", "search", "load")
_EVERYTHING: _Given = {"items": ("*",), "verbs": (*_USE, "help"), "spawn": ("*",)}
_IMPLIED = {
    "all": ("search", "load", "execute", "help"),
    "*": ("search", "load", "execute", "help"),
    "execute": ("execute", "search", "load", "help"),
    **{verb: (verb,) for verb in ("search", "load", "help")},
}
_CAPS = {"fs": "filesystem", "process": "shell", "net": "network"}
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "*")
_WORDS = ("read", "write", "hosts", "commands", "variables", "spawn")
"""Keys of the mapping form that are fields of a grant; `tools`, `directives`, `knowledge` and `skills` name items."""
_LISTS = ("tools", "directives", "knowledge", "skills", *_WORDS)
_USES = ("read", "write", "commands", "variables")
_RUNTIME = "_runtime"


def permission_faults(written: Json, sheets: TypeSpecs | None = None) -> tuple[Issue, ...]:
    """Return the faults of the permissions of a directive."""
    if isinstance(written, Mapping):
        return tuple(_list_faults(written))
    known = sheets or load_type_specs()
    return tuple(
        issue for number, one in enumerate(as_list(written)) for issue in _faults(as_object(one), number, known)
    )


def grant_of(written: Json, name: str, sheets: TypeSpecs | None = None) -> Grant:
    """Return the grant that permissions give, with this name; an empty grant if there are none.

    An item that they name may use what it needs, as far as the other grants allow it. Where permissions speak of
    files, hosts, commands or variables, the items are bounded by that too. What is marked `delegate` is left out:
    `delegate_of` gives it.
    """
    return _opened(said_by(written, name, sheets))


def said_by(written: Json, name: str, sheets: TypeSpecs | None = None) -> Grant:
    """Return the rules that permissions write out, without what their items may use besides."""
    return _grant(written, name, sheets or load_type_specs(), with_delegated=False)


def delegate_of(written: Json, name: str, sheets: TypeSpecs | None = None) -> Grant:
    """Return the grant that the holder of permissions may pass on: its own, and what is marked `delegate`."""
    return _opened(_grant(written, name, sheets or load_type_specs(), with_delegated=True))


def with_skills(grant: Grant, names: Sequence[str]) -> Grant:
    """Return a grant that also lets its holder read some skills."""
    return _with(grant, "traits", [one for name in names for one in _traits("skill", name)], is_denied=False)


def spawn_name(manifest: Manifest) -> str:
    """Return the name of a directive or thread in rules about spawning: `category/name`."""
    return f"{manifest.category}/{manifest.tool_id}" if manifest.category else manifest.tool_id


def _grant(written: Json, name: str, sheets: TypeSpecs, *, with_delegated: bool) -> Grant:
    grant = empty_grant(name)
    for word, patterns in _listed(as_object(written)):
        grant = _with(grant, word, patterns, is_denied=False)
    for one in map(as_object, as_list(written)):
        tag, attributes = as_text(one.get("tag")), as_object(one.get("attrs"))
        if as_text(attributes.get("delegate")).lower() == "true" and not with_delegated:
            continue
        for word, patterns in _given(one, sheets).items():
            grant = _with(grant, word, patterns, is_denied=tag == "deny")
        for word in _words(attributes.get("deny_directives")):
            grant = _with(grant, "spawn", _named(word), is_denied=True)
    return grant


def _opened(grant: Grant) -> Grant:
    """Return a grant of items that leaves to other grants what it does not mention."""
    if not (grant.items.allow or grant.traits.allow):
        return grant
    silent = {word: rules for word in _USES if not (rules := _rules(grant, word)).allow}
    opened: Mapping[str, Rules] = {
        word: Rules(LEFT_TO_OTHERS.allow if word in {"read", "write"} else ("*",), rules.deny)
        for word, rules in silent.items()
    }
    is_public = not (grant.hosts.allow or grant.endpoints.allow)
    return replace(grant, **opened, is_public=is_public, starts_items=True)


def _rules(grant: Grant, word: str) -> Rules:
    found: Rules = getattr(grant, word)
    return found


def _faults(one: JsonObject, number: int, sheets: TypeSpecs) -> Iterator[Issue]:
    tag, attributes, place = as_text(one.get("tag")), as_object(one.get("attrs")), f"config.permissions[{number}]"
    if tag not in _TAGS:
        yield Issue(place, f"<{tag:.40}> is not a permission", use_one_of(tag, _TAGS))
        return
    for word in attributes:
        if word not in _ATTRIBUTES and tag != "acknowledge":
            yield Issue(place, f"`{word:.40}` says nothing about a permission", use_one_of(word, _ATTRIBUTES))
    if _is_nested(one):
        yield from _nested_faults(one, place)
        return
    resource = as_text(attributes.get("resource"))
    if tag in (*_ACTIONS, "deny") and _kind(resource) not in _RESOURCES:
        fix = f"{did_you_mean(resource, _RESOURCES)}Write `resource` as one of: {', '.join(_RESOURCES)}."
        yield Issue(place, f"{resource!r:.40} is not a resource", fix)
    if tag == "cap" and not _given(one, sheets):
        yield Issue(place, "names no capability", "Write one such as `<cap>fs.read</cap>`.")
    if tag == "all" and as_text(one.get("content")) != "*":
        yield Issue(place, "is not a permission", "Write `*`, or one element for each permission.")
    if "tool_type" in attributes and _trait(as_text(attributes["tool_type"]), sheets) is None:
        guess = did_you_mean(as_text(attributes["tool_type"]), (*sheets.types(), *sheets.aliases))
        fix = f"{guess}Name a type, or a runtime (`…{_RUNTIME}`)."
        yield Issue(place, f"{attributes['tool_type']!r:.40} is neither a type nor a runtime", fix)
    for text in _words(attributes.get("endpoint")):
        if _endpoint(text) is None:
            yield Issue(place, f"{text!r:.80} is not an endpoint", "Write `POST /users`, or a URL or host.")
    if as_text(attributes.get("delegate", "true")).lower() not in {"true", "false"}:
        yield Issue(place, "`delegate` is not true or false", 'Write `delegate="true"`, or leave it out.')


def _nested_faults(one: JsonObject, place: str) -> Iterator[Issue]:
    children = [as_object(child) for child in as_list(one.get("children"))]
    if not children and as_text(one.get("content")) != "*":
        yield Issue(place, "names no items", "Write `<tool>NAME</tool>` in it, or `*` for all.")
    for number, child in enumerate(children):
        kind, inner = as_text(child.get("tag")), f"{place}.{number}"
        if kind not in _KINDS:
            yield Issue(inner, f"<{kind:.40}> is no kind of item", use_one_of(kind, _KINDS))
        elif not as_text(child.get("content")) or as_list(child.get("children")):
            yield Issue(inner, "names no item", f"Write `<{kind}>NAME</{kind}>`, where `*` stands for any.")
        elif "@" in as_text(child.get("content")):
            yield Issue(inner, "names a version", "Write the name alone: a permission is for every version.")


def _list_faults(written: JsonObject) -> Iterator[Issue]:
    for word, names in written.items():
        place = f"config.permissions.{word}"
        if word not in _LISTS:
            yield Issue(place, "is not a permission", use_one_of(word, _LISTS))
        elif not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
            yield Issue(place, "is not a list of texts", f"Write `{word}: [one, two]`.")
        elif word not in _WORDS and any("@" in as_text(name) for name in names):
            yield Issue(place, "names a version", "Write the names alone: a permission is for every version.")


def _listed(written: JsonObject) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield what the mapping form gives, such as `{tools: [web_search]}`: fields of a grant, and patterns."""
    for word, names in written.items():
        patterns = [as_text(name).strip() for name in as_list(names) if as_text(name).strip()]
        if word == "spawn":
            yield word, [one for name in patterns for one in _named(name)]
        elif word in _WORDS:
            yield word, patterns
        elif word in _LISTS:
            yield from _of_items(word.removesuffix("s"), patterns).items()


def _is_nested(one: JsonObject) -> bool:
    tag = as_text(one.get("tag"))
    is_new = tag in _NESTED and tag not in _ACTIONS
    is_bare = tag == "execute" and not as_object(one.get("attrs")).keys() - {"delegate"}
    return is_new or (is_bare and bool(as_list(one.get("children")) or as_text(one.get("content"))))


def _given(one: JsonObject, sheets: TypeSpecs) -> _Given:
    tag, attributes, content = as_text(one.get("tag")), as_object(one.get("attrs")), as_text(one.get("content"))
    if _is_nested(one):
        return _nested(tag, one)
    match tag:
        case "read" | "write" | "execute" | "deny":
            gives = _RESOURCES.get(_kind(as_text(attributes.get("resource"))))
            given = gives(tag, attributes) if gives else {}
            # A name says more than a type, which gives all items with a chain that passes that type or runtime.
            if gives is not _items or "tool_type" not in attributes or tag == "read" or given.get("items"):
                return given
            trait = _trait(as_text(attributes["tool_type"]), sheets)
            return {**given, **({"traits": (trait,), **_used(tag)} if trait else {})}
        case "shell" | "env":
            return _RESOURCES[tag](tag, attributes)
        case "cap":
            return _capability(as_text(attributes.get("name")) or content, attributes)
        case "orchestration":
            categories = [f"{word}/*" for word in _words(attributes.get("allow_categories"))]
            named = [name for word in _words(attributes.get("allow_directives")) for name in _named(word)]
            return {"spawn": [*categories, *named]}
        case "knowledge" | "directives":
            return {**_items("execute", attributes), "verbs": ("search", "load")}
        case "all" if content == "*":
            return {**_EVERYTHING, "read": ("**",), "write": ("**",), "hosts": ("*",), "commands": ("*",)}
        case _:
            return {}


def _nested(tag: str, one: JsonObject) -> _Given:
    """Return what an element with items in it gives. Search and load are rights of their own, whatever the items."""
    if tag != "execute":
        return {"verbs": (tag if tag != "sign" else "execute.sign",)}
    given: dict[str, list[str]] = {}
    for child in map(as_object, as_list(one.get("children"))):
        for word, patterns in _of_items(as_text(child.get("tag")), [as_text(child.get("content"))]).items():
            given.setdefault(word, []).extend(patterns)
    return given or (_EVERYTHING if as_text(one.get("content")) == "*" else {})


def _of_items(kind: str, names: Sequence[str]) -> _Given:
    """Return what names of items of a kind give: running them, and for directives also starting them apart."""
    plain = [name for name in names if name]
    given: dict[str, Sequence[str]] = {"verbs": _USE} if plain else {}
    given["items"] = [_identity(name) for name in plain if kind == "tool" and _is_short(name)]
    given["traits"] = [one for name in plain if not (kind == "tool" and _is_short(name)) for one in _traits(kind, name)]
    if kind == "directive" and plain:
        given["spawn"] = [pattern for name in plain for pattern in _named(name.replace(".", "/"))]
    return given


def _trait(word: str, sheets: TypeSpecs) -> str | None:
    """Return the trait that a word of a permission names; None if it is neither a type nor a runtime."""
    kind, runtime = sheets.canonical(word)
    if runtime or word.endswith(_RUNTIME):
        return f"runtime/{runtime or word}"
    return f"type/{kind}" if sheets.get(kind) else None


def _capability(text: str, attributes: JsonObject) -> _Given:
    first, _, rest = text.strip().partition(".")
    match first:
        case "tool":
            return _items("execute", {"id": rest}) if rest else {}
        case "kiwi-mcp":
            return _verbs("execute", {"action": rest}) if rest else {}
        case "spawn":
            return _RESOURCES["spawn"]("execute", attributes)
        case _:
            gives = _RESOURCES.get(_CAPS.get(first, first))
            tag = {"exec": "execute"}.get(rest, rest)
            return gives(tag, attributes) if gives and tag in _ACTIONS else {}


def _files(tag: str, attributes: JsonObject) -> _Given:
    paths = _words(attributes.get("path")) or ("**",)
    # What may be written is seen too.
    return {"read": paths, **({"write": paths} if tag in {"write", "deny"} else {})}


def _items(tag: str, attributes: JsonObject) -> _Given:
    names = _of(attributes, "id", "tool_id", "name", "action")
    if tag == "read":
        return {"verbs": ("search", "load")}
    if not names and "tool_type" in attributes:
        return {}  # the type alone says which
    return {"items": [_identity(name) for name in names] or ("*",), **_used(tag)}


def _used(tag: str) -> _Given:
    return {} if tag == "deny" else {"verbs": _USE}


def _verbs(tag: str, attributes: JsonObject) -> _Given:
    found: list[str] = []
    for word in _of(attributes, "action", "actions") or ("*",):
        if word in _IMPLIED:
            found += (word,) if tag == "deny" else _IMPLIED[word]
        else:
            found.append(word if "." in word else f"execute.{word}")
    return {"verbs": found}


def _hosts(_: str, attributes: JsonObject) -> _Given:
    endpoints = _words(attributes.get("endpoint"))
    if not endpoints:
        return {"hosts": ("*",)}
    read = [found for text in endpoints if (found := _endpoint(text))]
    return {
        "hosts": [host for host, request in read if not request],
        "endpoints": [request for _, request in read if request],
    }


def _endpoint(text: str) -> tuple[str, str] | None:
    """Return the host that an endpoint names, or the request: `POST /users` is that path on any host."""
    method, _, target = text.rpartition(" ")
    method = method.strip().upper()
    if method and method not in _METHODS:
        return None
    if target.startswith("/"):
        return "", f"{method or '*'} *{target}"
    try:
        url = urlsplit(target if "//" in target else f"//{target}")
        host, port = url.netloc.rpartition("@")[2], url.port
    except ValueError:
        return None
    if not host or not method:
        return (host, "") if host else None
    ports = {"https": ":443", "http": ":80"}
    where = host if port else f"{host}{ports.get(url.scheme, '')}"
    return host, f"{method} {where}{url.path or '/*'}"


def _servers(tag: str, attributes: JsonObject) -> _Given:
    server = as_text(attributes.get("resource")).partition(":")[2] or as_text(attributes.get("name")) or "*"
    tools = _of(attributes, "id", "tool_id", "action", "actions") or ("*",)
    return {"items": [f"mcp/{server}/{tool}@*" for tool in tools], **_used(tag)}


def _registry(tag: str, _: JsonObject) -> _Given:
    reading = ("registry.show", "execute.versions", "execute.diff", "execute.verify", "execute.list")
    return {"verbs": reading if tag == "read" else (*reading, "registry", "execute.publish", "execute.pull")}


_RESOURCES: Mapping[str, Callable[[str, JsonObject], _Given]] = {
    "filesystem": _files,
    "files": _files,
    "tool": _items,
    "kiwi-mcp": _verbs,
    "shell": lambda _, attributes: {"commands": _words(attributes.get("commands")) or ("*",)},
    "mcp": _servers,
    "network": _hosts,
    "api": _hosts,
    "env": lambda _, attributes: {"variables": _of(attributes, "var", "vars", "name") or ("*",)},
    "python": lambda *_: {"commands": ("python", "python3")},
    "spawn": lambda _, attributes: {
        "spawn": [name for word in _of(attributes, "id", "name") or ("*",) for name in _named(word)]
    },
    "registry": _registry,
}


def _kind(resource: str) -> str:
    return "mcp" if resource.startswith("mcp:") else resource


def _with(grant: Grant, word: str, patterns: Sequence[str], *, is_denied: bool) -> Grant:
    known = _rules(grant, word)
    side = "deny" if is_denied else "allow"
    rules = replace(known, **{side: tuple(dict.fromkeys((*getattr(known, side), *patterns)))})
    changed: Mapping[str, Rules] = {word: rules}
    return replace(grant, **changed)


def _of(attributes: JsonObject, *names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in _words(attributes.get(name)))


def _words(value: Json) -> tuple[str, ...]:
    return tuple(word.strip() for word in as_text(value).split(",") if word.strip())


def _identity(name: str) -> str:
    if name == "*":
        return name
    return f"{name if '/' in name else f'*/{name}'}{'' if '@' in name else '@*'}"


def _is_short(name: str) -> bool:
    """Whether a name is that of one item, without a category."""
    return is_plain(name) and "/" not in name and "." not in name


def _traits(kind: str, name: str) -> tuple[str, ...]:
    """Return the traits that a name means: `name`, `a.b.name` or `a/b/name`, where `a.*` is all below `a`."""
    return tuple(f"item/{kind}/{one}" for one in _named(name.replace(".", "/")))


def _named(word: str) -> tuple[str, ...]:
    return (word,) if "/" in word or word == "*" else (word, f"*/{word}")
