"""Checks of short texts in manifests: URLs, variables, version ranges and package requirements."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import urlsplit

from kiwi_mcp.domain.names import Range, is_safe_path
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.json_schema import Formats
from kiwi_mcp.manifest.templates import pieces

MAX_LENGTH = 300

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_EXTRAS = rf"\[\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\]"
_CLAUSE = r"(?:===|~=|==|!=|<=|>=|<|>)\s*[A-Za-z0-9][A-Za-z0-9.!+*_-]*"
_CLAUSES = rf"{_CLAUSE}(?:\s*,\s*{_CLAUSE})*"
_PYTHON = lazy_pattern(rf"({_NAME})\s*(?:{_EXTRAS})?\s*(?:{_CLAUSES}|\(\s*{_CLAUSES}\s*\))?\s*(?:;(.*))?", re.ASCII)

_MARKER = lazy_pattern(
    r"\s*(?:(?P<open>\()|(?P<close>\))|(?P<join>and|or)\b"
    r"|(?P<operator>===|~=|==|!=|<=|>=|<|>|in\b|not\s+in\b)"
    r"|(?P<value>(?:python_version|python_full_version|os_name|sys_platform|platform_release|platform_system"
    r"|platform_version|platform_machine|platform_python_implementation|implementation_name"
    r"|implementation_version|extra)\b|'[^'\"\\]*'|\"[^'\"\\]*\"))\s*",
    re.ASCII,
)

_NPM_NAME = r"(?:@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*"
_NPM_PARTIAL = r"v?(?:\d+|[xX*])(?:\.(?:\d+|[xX*])){0,2}(?:-[0-9A-Za-z.-]+)?(?:\+[0-9A-Za-z.-]+)?"
_NPM_CLAUSE = rf"(?:\^|~|>=|<=|>|<|=)?\s*{_NPM_PARTIAL}"
_NPM_SET = rf"(?:{_NPM_PARTIAL}\s+-\s+{_NPM_PARTIAL}|{_NPM_CLAUSE}(?:\s+{_NPM_CLAUSE})*)"
_NPM_RANGE = lazy_pattern(rf"{_NPM_SET}(?:\s*\|\|\s*{_NPM_SET})*", re.ASCII)
_NPM = lazy_pattern(rf"({_NPM_NAME})(?:@(.+))?", re.ASCII)


def is_python_requirement(text: str) -> bool:
    """Whether the text is a package of an index as PEP 508 writes it: name, extras, versions, marker."""
    if len(text) > MAX_LENGTH or (found := _PYTHON.fullmatch(text.strip(" \t"))) is None:
        return False
    return found.group(2) is None or _is_marker(found.group(2))


def is_node_requirement(text: str) -> bool:
    """Whether the text is a package of an index as npm writes it: `name`, `@scope/name`, `name@range`."""
    if len(text) > MAX_LENGTH or (found := _NPM.fullmatch(text)) is None:
        return False
    # A range of versions may follow; tags, addresses and paths are none.
    return found.group(2) is None or _NPM_RANGE.fullmatch(found.group(2).strip()) is not None


def package_name(requirement: str) -> str:
    """Return the name a Python requirement is about, spelled as indexes compare it."""
    found = re.match(_NAME, requirement.strip(), re.ASCII)
    return re.sub(r"[-_.]+", "-", found.group()).lower() if found else ""


_FOLLOWING = {
    ("value", "value"): "operator",
    ("operator", "operator"): "right",
    ("right", "value"): "join",
    ("join", "join"): "value",
}


def _is_marker(text: str) -> bool:
    # A marker is `value operator value`, joined by and/or and grouped by parentheses.
    position, depth, expects = 0, 0, "value"
    while position < len(text):
        found = _MARKER.match(text, position)
        if found is None:
            return False
        step = (expects, found.lastgroup or "")
        if step == ("value", "open"):
            depth += 1
        elif step == ("join", "close") and depth:
            depth -= 1
        elif step in _FOLLOWING:
            expects = _FOLLOWING[step]
        else:
            return False
        position = found.end()
    return expects == "join" and depth == 0


_SCHEMES = {"http", "https", "ws", "wss"}
_SPACE_OR_CONTROL = lazy_pattern(r"[\x00-\x20\x7f]")
_VARIABLE = lazy_pattern(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)

# What loaders, interpreters, shells and git obey: setting one of these is running code of one's choice.
_OBEYED = {
    "PATH", "IFS", "ENV", "BASH_ENV", "SHELLOPTS", "BASHOPTS", "PS4", "PROMPT_COMMAND", "CDPATH", "GLOBIGNORE",
    "NODE_OPTIONS", "NODE_PATH", "NODE_EXTRA_CA_CERTS", "PERL5OPT", "PERL5LIB", "PERL5DB", "PERLLIB", "RUBYOPT",
    "RUBYLIB", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "CLASSPATH", "LUA_INIT", "LUA_PATH",
    "LUA_CPATH", "PHPRC", "PHP_INI_SCAN_DIR", "R_PROFILE", "R_ENVIRON", "GCONV_PATH", "LOCPATH", "NLSPATH",
    "MALLOC_CHECK_", "HOSTALIASES", "RES_OPTIONS", "TERMINFO", "TERMCAP", "EDITOR", "VISUAL", "PAGER", "BROWSER",
    "SHELL", "SSH_ASKPASS", "SUDO_ASKPASS", "OPENSSL_CONF", "OPENSSL_MODULES", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "DENO_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "AWS_CA_BUNDLE", "BUN_OPTIONS", "RUSTC_WRAPPER", "RUSTFLAGS",
}  # fmt: skip
_OBEYED_PREFIXES = (
    "LD_", "DYLD_", "PYTHON", "GIT_", "NPM_CONFIG_", "UV_", "PIP_", "BASH_FUNC_", "LUA_INIT_", "LUA_PATH_", "KIWI_",
)  # fmt: skip
_HARMLESS = {
    "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONHASHSEED",
    "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL",
}  # fmt: skip


def is_url(text: str) -> bool:
    """Whether the text is an address with a fixed scheme, host and port, or begins with an owner's variable."""
    parts = pieces(text)
    if _SPACE_OR_CONTROL.search(text) or not parts:
        return False
    rest = "".join({"text": part.text, "name": "\ue000", "variable": "1"}[part.kind] for part in parts)
    if parts[0].kind == "variable":
        return len(rest) == 1 or rest[1] in "/?#"
    try:
        split = urlsplit(rest)
        return split.scheme in _SCHEMES and bool(split.hostname) and "\ue000" not in split.netloc and split.port != 0
    except ValueError:
        return False


def is_variable(name: str) -> bool:
    """Whether an item may name this environment variable: no loader, interpreter or shell obeys it."""
    upper = name.upper()
    is_obeyed = upper in _OBEYED or (upper.startswith(_OBEYED_PREFIXES) and upper not in _HARMLESS)
    return _VARIABLE.fullmatch(name) is not None and not is_obeyed


def is_range(text: str) -> bool:
    """Whether the text is a range of versions."""
    return Range.parse(text) is not None


_GEM = lazy_pattern(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?::[0-9][0-9A-Za-z.]*)?", re.ASCII)


def is_gem_requirement(text: str) -> bool:
    """Whether the text is a package of an index as `gem` writes it: `name` or `name:version`."""
    return len(text) <= MAX_LENGTH and _GEM.fullmatch(text) is not None


Requirement = Literal["pep508", "npm", "gem", ""]
"""How a package is written: as Python, Node.js or Ruby do; empty if it may be any of them."""
_REQUIREMENTS: Mapping[Requirement, Callable[[str], bool]] = {
    "pep508": is_python_requirement,
    "npm": is_node_requirement,
    "gem": is_gem_requirement,
    "": lambda text: is_python_requirement(text) or is_node_requirement(text) or is_gem_requirement(text),
}


def is_requirement_of(requirement: Requirement) -> Callable[[str], bool]:
    """Return the check of packages that are written in one way."""
    return _REQUIREMENTS[requirement]


def formats_for(requirement: Requirement) -> Formats:
    """Return the formats of type specs, with packages as a runtime writes them."""
    return (
        ("path", is_safe_path),
        ("range", is_range),
        ("requirement", _REQUIREMENTS[requirement]),
        ("url", is_url),
        ("variable", is_variable),
    )
