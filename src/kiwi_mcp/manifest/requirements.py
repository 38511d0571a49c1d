"""The grammar of dependencies: names and versions from an index, never an address, a path or an option."""

from __future__ import annotations

import re

MAX_LENGTH = 300

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_EXTRAS = rf"\[\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\]"
_CLAUSE = r"(?:===|~=|==|!=|<=|>=|<|>)\s*[A-Za-z0-9][A-Za-z0-9.!+*_-]*"
_CLAUSES = rf"{_CLAUSE}(?:\s*,\s*{_CLAUSE})*"
_PYTHON = re.compile(rf"({_NAME})\s*(?:{_EXTRAS})?\s*(?:{_CLAUSES}|\(\s*{_CLAUSES}\s*\))?\s*(?:;(.*))?", re.ASCII)

_MARKER = re.compile(
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
_NPM_RANGE = re.compile(rf"{_NPM_SET}(?:\s*\|\|\s*{_NPM_SET})*", re.ASCII)
_NPM = re.compile(rf"({_NPM_NAME})(?:@(.+))?", re.ASCII)


def is_python_requirement(text: str) -> bool:
    """Whether the text is a package of an index as PEP 508 writes it: name, extras, versions, marker."""
    if len(text) > MAX_LENGTH or (found := _PYTHON.fullmatch(text.strip(" \t"))) is None:
        return False
    return found.group(2) is None or _is_marker(found.group(2))


def is_node_requirement(text: str) -> bool:
    """Whether the text is a package of an index as npm writes it: `name`, `@scope/name`, `name@range`."""
    if len(text) > MAX_LENGTH or (found := _NPM.fullmatch(text)) is None:
        return False
    return found.group(2) is None or is_node_range(found.group(2))


def is_node_range(text: str) -> bool:
    """Whether the text is a range of versions as npm writes it; tags, addresses and paths are not."""
    return len(text) <= MAX_LENGTH and _NPM_RANGE.fullmatch(text.strip()) is not None


def package_name(requirement: str) -> str:
    """Return the name a Python requirement is about, spelled as indexes compare it."""
    found = re.match(_NAME, requirement.strip(), re.ASCII)
    return re.sub(r"[-_.]+", "-", found.group()).lower() if found else ""


def _is_marker(text: str) -> bool:
    # A marker is `value operator value`, joined by and/or and grouped by parentheses.
    position, depth, expects = 0, 0, "value"
    while position < len(text):
        found = _MARKER.match(text, position)
        if found is None:
            return False
        kind = found.lastgroup or ""
        match (expects, kind):
            case ("value", "open"):
                depth += 1
            case ("join", "close") if depth:
                depth -= 1
            case ("value", "value"):
                expects = "operator"
            case ("operator", "operator"):
                expects = "right"
            case ("right", "value"):
                expects = "join"
            case ("join", "join"):
                expects = "value"
            case _:
                return False
        position = found.end()
    return expects == "join" and depth == 0
