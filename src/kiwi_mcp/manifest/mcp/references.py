"""References of other clients (`${env:NAME}`, `${input:NAME}`) as Kiwi writes them; secrets replaced by references."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from urllib.parse import unquote

from msgspec import Struct, field

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.secret import Secret, is_filler, is_secret, looks_secret, names_secret

_REFERENCE = re.compile(r"\$\{([^{}$]*)\}")
_VARIABLE = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(:-[^{}]*)?", re.ASCII)
_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z][A-Za-z0-9_]*)*\}")
_SCHEME = re.compile(r"((?:bearer|basic|token|apikey|digest)\s+)(.*)", re.IGNORECASE | re.DOTALL)
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9]+")
_OPEN_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie"})
_PROJECT = "{project}"
_FIXED: Mapping[str, str] = {
    "workspaceFolder": _PROJECT,
    "workspaceRoot": _PROJECT,
    "cwd": _PROJECT,
    "CLAUDE_PROJECT_DIR": _PROJECT,
    "userHome": "${HOME}",
    "pathSeparator": "/",
    "/": "/",
}
_ALWAYS_SET = frozenset({"HOME", "USER", "LANG", "TMPDIR"})
_SHORTEST_PART = 8
_MARK = "\ue000"
"""Stands for a reference while an address is taken apart; no address has this character."""


class ImportFindings(Struct):
    """What is found in a configuration besides its servers: secrets, variables to set, and issues."""

    inputs: Mapping[str, JsonObject] = field(default_factory=dict)
    secrets: dict[str, Secret] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    hashes: dict[str, bytes] = field(default_factory=dict)
    """A hash of each secret, to compare two secrets without reading them again."""

    def warn(self, place: str, reason: str, fix: str) -> None:
        """Note something that the owner should look at."""
        self.issues.append(Issue(place, reason, fix, "warning"))

    def put_aside(self, wanted: str, value: str, *, owner: str, purpose: str) -> str:
        """Put a secret aside and return the reference to it; one value has one name, two values have two."""
        if is_filler(value):
            self.variables.setdefault(wanted, purpose)
            return f"${{{wanted}}}"
        name, number = wanted, 1
        digest = sha256(value.encode(errors="surrogatepass")).digest()
        while self.hashes.setdefault(name, digest) != digest:
            own = wanted if wanted.startswith(f"{variable_name(owner)}_") else variable_name(owner, wanted)
            name = own if number == 1 and own != wanted else f"{own}_{number + 1}"
            number += 1
        self.secrets[name] = Secret(value)
        self.variables.setdefault(name, purpose)
        return f"${{{name}}}"


def variable_name(*parts: str) -> str:
    """Return the name of a variable made of words: `("my server", "X-Api-Key")` is `MY_SERVER_API_KEY`."""
    words = [_NOT_IN_NAME.sub("_", part.removeprefix("X-").removeprefix("x-")).strip("_").upper() for part in parts]
    name = "_".join(word for word in words if word.isascii() and word)
    return (f"_{name}" if name[:1].isdigit() else name)[:120] or "SECRET"


def translate(text: str, findings: ImportFindings, *, place: str, stands_for: str) -> str:
    """Return a text with the references of other clients as Kiwi writes them, and its own braces kept apart.

    `stands_for` names the variable for a reference that only the client could resolve.
    """
    done, end = "", 0
    for found in _REFERENCE.finditer(text):
        done += _literal(text[end : found.start()], findings, place)
        done += _translated(found, findings, place, stands_for)
        end = found.end()
    return done + _literal(text[end:], findings, place)


def protect(text: str, findings: ImportFindings, *, name: str, stands_for: str, owner: str, place: str) -> str:
    """Return a text for a manifest: secrets put aside as references, other clients' references translated."""
    purpose = f"`{name}` of {owner}" if name else f"an argument of {owner}"
    if "${" not in text:
        if is_secret(name, text):
            return findings.put_aside(stands_for, text, owner=owner, purpose=purpose)
        return _literal(text, findings, place)

    def hide(part: str) -> str:
        return findings.put_aside(stands_for, part, owner=owner, purpose=purpose) if looks_secret(part) else ""

    return _between(text, findings, place, stands_for, hide)


def protect_header(name: str, text: str, findings: ImportFindings, *, owner: str, place: str) -> str:
    """Return a header's value for a manifest; of `Bearer …` and the like only the second word is the secret."""
    is_open = name.lower() in _OPEN_HEADERS or names_secret(name)
    stands_for = variable_name(owner, "token" if name.lower() == "authorization" else name)
    scheme = _SCHEME.fullmatch(text)
    word, rest = (scheme[1], scheme[2]) if scheme else ("", text)
    if "${" not in rest:
        if (is_open and rest) or looks_secret(rest):
            return word + findings.put_aside(stands_for, rest, owner=owner, purpose=f"header `{name}` of {owner}")
        return word + _literal(rest, findings, place)

    def hide(part: str) -> str:
        is_long = is_open and len(part.strip()) >= _SHORTEST_PART
        if not is_long and not looks_secret(part):
            return ""
        return findings.put_aside(stands_for, part, owner=owner, purpose=f"header `{name}` of {owner}")

    return word + _between(rest, findings, place, stands_for, hide)


def _between(text: str, findings: ImportFindings, place: str, stands_for: str, hide: Callable[[str], str]) -> str:
    """Return a text with references translated, and the text between them hidden where it must be."""
    done, end = "", 0
    for found in [*_REFERENCE.finditer(text), None]:
        part = text[end : found.start() if found else len(text)]
        done += hide(part) or _literal(part, findings, place)
        if found:
            done, end = done + _translated(found, findings, place, stands_for), found.end()
    return done


def _translated(found: re.Match[str], findings: ImportFindings, place: str, stands_for: str) -> str:
    body = found[1]
    kind, colon, rest = body.partition(":")
    if body in _FIXED or (kind in _FIXED and colon):
        return _FIXED[kind]
    if variable := _VARIABLE.fullmatch(body):
        name, default = variable[1], variable[2] or ""
        if default and is_secret(name, default.removeprefix(":-")):
            return findings.put_aside(name, default.removeprefix(":-"), owner=stands_for, purpose=place)
        if not default and name not in _ALWAYS_SET:
            findings.variables.setdefault(name, place)
        return f"${{{name}{default}}}"
    if kind == "input":
        # The variable that takes the place of a question the client would have asked.
        name, words = variable_name(rest), findings.inputs.get(rest, {})
        default = as_text(words.get("default"))
        purpose = as_text(words.get("description")) or f"the input `{rest}`"
        if default and (words.get("password") is True or is_secret(name, default)):
            return findings.put_aside(name, default, owner=rest, purpose=purpose)
        if default and not re.search("[{}]", default):
            return f"${{{name}:-{default}}}"
        findings.variables.setdefault(name, purpose)
        return f"${{{name}}}"
    fix = f"Set {stands_for}, in the environment or in the user's .env, to what it gave there."
    findings.warn(place, f"`${{{kind if kind.isidentifier() else ''}…}}` means something to that client alone", fix)
    findings.variables.setdefault(stands_for, place)
    return f"${{{stands_for}}}"


def _literal(text: str, findings: ImportFindings, place: str) -> str:
    """Return text that reads as itself in a manifest."""
    if "${" in text:
        fix = "Write it as `${NAME}` or `${NAME:-default}`, without a reference inside another."
        findings.warn(place, "holds a `${` that is not understood, and is kept as it is written", fix)
        text = text.replace("${", "$${")
    return _PLACEHOLDER.sub(r"{\g<0>}", text)


def protect_url(url: str, findings: ImportFindings, *, owner: str, place: str) -> str:
    """Return an address for a manifest: a login, a key in its path and secret values of its query put aside."""
    # References may contain slashes and question marks, so they are set aside while the rest is parsed.
    references = _REFERENCE.finditer(url := url.replace(_MARK, ""))
    address, question, query = _REFERENCE.sub(_MARK, url).partition("?")
    scheme, colon, rest = address.rpartition("://")
    lead, *path = rest.split("/")
    login, _, host = lead.rpartition("@")
    if login and _MARK not in login:
        login = findings.put_aside(variable_name(owner, "login"), login, owner=owner, purpose=f"login at {host[:80]}")
    segments = [_url_part("", part, findings, owner, place) for part in path]
    pairs = [_url_pair(pair, findings, owner, place) for pair in query.split("&")]
    done = scheme + colon + login + ("@" if login else "") + "/".join([host, *segments]) + question + "&".join(pairs)
    stands_for = variable_name(owner, "url")
    return re.sub(_MARK, lambda _: _translated(next(references), findings, place, stands_for), done)


def _url_pair(pair: str, findings: ImportFindings, owner: str, place: str) -> str:
    name, equals, value = pair.partition("=")
    return name + equals + _url_part(unquote(name), value, findings, owner, place) if equals else pair


def _url_part(name: str, part: str, findings: ImportFindings, owner: str, place: str) -> str:
    stands_for = variable_name(owner, name or "key")
    if _MARK not in part and is_secret(name, unquote(part)):
        purpose = f"`{name}` in the address of {owner}" if name else f"part of the address of {owner}"
        return findings.put_aside(stands_for, unquote(part), owner=owner, purpose=purpose)
    return _literal(part, findings, place)
