"""The formats that type sheets may ask of a word: addresses, paths, packages, variables, ranges."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import urlsplit

from kiwi_mcp.domain.version import Range
from kiwi_mcp.manifest.names import is_safe_path
from kiwi_mcp.manifest.render import pieces
from kiwi_mcp.manifest.requirements import is_node_requirement, is_python_requirement
from kiwi_mcp.manifest.schema import Formats

_SCHEMES = {"http", "https", "ws", "wss"}
_SPACE_OR_CONTROL = re.compile(r"[\x00-\x20\x7f]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)

# What loaders, interpreters, shells and git obey: setting one of these is running code of one's choice.
_OBEYED = {
    "PATH", "IFS", "ENV", "BASH_ENV", "SHELLOPTS", "BASHOPTS", "PS4", "PROMPT_COMMAND", "CDPATH", "GLOBIGNORE",
    "NODE_OPTIONS", "NODE_PATH", "NODE_EXTRA_CA_CERTS", "PERL5OPT", "PERL5LIB", "PERL5DB", "PERLLIB", "RUBYOPT",
    "RUBYLIB", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "CLASSPATH", "LUA_INIT", "LUA_PATH",
    "LUA_CPATH", "PHPRC", "PHP_INI_SCAN_DIR", "R_PROFILE", "R_ENVIRON", "GCONV_PATH", "LOCPATH", "NLSPATH",
    "MALLOC_CHECK_", "HOSTALIASES", "RES_OPTIONS", "TERMINFO", "TERMCAP", "EDITOR", "VISUAL", "PAGER", "BROWSER",
    "SHELL", "SSH_ASKPASS", "SUDO_ASKPASS", "OPENSSL_CONF", "OPENSSL_MODULES", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "DENO_CERT", "BUN_OPTIONS", "RUSTC_WRAPPER", "RUSTFLAGS",
}  # fmt: skip
_OBEYED_PREFIXES = (
    "LD_", "DYLD_", "PYTHON", "GIT_", "NPM_CONFIG_", "UV_", "PIP_", "BASH_FUNC_", "LUA_INIT_", "LUA_PATH_", "KIWI_",
)  # fmt: skip
_HARMLESS = {
    "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONHASHSEED",
    "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL",
}  # fmt: skip


def is_url(text: str) -> bool:
    """Whether the text is an address whose scheme, host and port no parameter can change.

    A variable of the owner may be the whole address, or what stands before the path.
    """
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


def is_requirement(text: str) -> bool:
    """Whether the text is a package of an index, for Python or for Node."""
    return is_python_requirement(text) or is_node_requirement(text)


_REQUIREMENTS: Mapping[str, Callable[[str], bool]] = {
    "python": is_python_requirement,
    "node": is_node_requirement,
    "": is_requirement,
}


def formats_for(environment: Literal["python", "node", ""]) -> Formats:
    """Return the formats of sheets, with packages as the environment writes them."""
    return (
        ("path", is_safe_path),
        ("range", is_range),
        ("requirement", _REQUIREMENTS[environment]),
        ("url", is_url),
        ("variable", is_variable),
    )
