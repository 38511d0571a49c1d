"""Spotting: what in a configuration is a secret, by the name it stands under or by its own looks.

Taking an ordinary word for a secret costs the owner a line in a file; the other mistake writes a key into a manifest.
So whatever may be one is taken for one.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = frozenset(
    {"key", "token", "secret", "secrets", "password", "passwd", "passphrase", "pass", "pwd", "auth", "authorization"}
    | {"credential", "credentials", "cookie", "pat", "bearer", "apikey", "dsn", "jwt", "signature", "webhook"}
)
_SECRET_ENDINGS = ("token", "secret", "password", "passwd", "passphrase", "apikey", "credentials")
# `AUTH_MODE`, `TOKEN_LIMIT`, `KEY_FILE` speak about a secret and hold none.
_ABOUT = frozenset(
    {"file", "path", "dir", "directory", "folder", "mode", "type", "method", "scheme", "limit", "ttl", "timeout"}
    | {"size", "count", "provider", "enabled", "host", "port", "header", "name", "prefix", "domain", "algorithm"}
)
_PLAIN_VALUES = frozenset({"", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null"})
_MARKED = re.compile(
    r"(?:sk|pk|rk)[-_][A-Za-z0-9_-]{8,}|gh[opsur]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[a-z]-[\w-]{8,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{16,}|ya29\.[\w-]{8,}|eyJ[\w-]{8,}\.[\w.-]+|-----BEGIN |npm_\w{16,}"
    r"|pypi-[\w-]{16,}|hf_\w{8,}|sbp_\w{8,}|SG\.[\w-]{8,}|dop_v1_\w{8,}|ntn_\w{8,}|secret_\w{8,}|figd_[\w-]{8,}"
    r"|lin_api_\w{8,}|tvly-[\w-]{8,}|(?:Bearer|Basic)\s+[\w.~+/=-]{8,}"
)
_UUID = re.compile(r"(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_USER_INFO = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@")
# `?token=…` of an address, `TOKEN=…` and `--token …` of a line for a shell.
_PAIR = re.compile(r"(?:^|[?&;\s])(?:([^=&;?#\s]+)=[^&#\s]|(--?[A-Za-z][\w-]*)\s+[^\s-])")
_PATH = re.compile(r"(?:~|\.{1,2})?/(?:[\w.@+-]+/)+[\w.@+-]*", re.ASCII)
_RUN = re.compile(r"[A-Za-z0-9]+")
_EDGE = re.compile(r"(?<=[0-9])(?=[A-Za-z])|(?<=[A-Za-z])(?=[0-9])")
_FILE = re.compile(r"(?:~|\.{1,2})?/[^\s]*|[A-Za-z]:[\\/].*")
_FILLER = re.compile(
    r"(?i)<.*>|\[.*\]|\.{3,}|…+|\*+|x{3,}|(?:your|my|the|insert|replace|enter|put|add|paste)[-_ ].*|.*[-_ ]here"
    r"|change[-_ ]?me|todo|placeholder|example"
)
_LONG_RUN = 16
_SHORT_RUN = 12
_EDGES = 3


def names_secret(name: str) -> bool:
    """Whether what stands under this name is a secret: `GITHUB_TOKEN`, `apiKey`, `X-Api-Key`, `--password`."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT:
        return False
    return any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words)


def is_secret(name: str, value: str) -> bool:
    """Whether a value is a secret, by its name or by its looks."""
    if looks_secret(value):
        return True
    return names_secret(name) and value.strip().lower() not in _PLAIN_VALUES and not _is_file(value)


def looks_secret(value: str) -> bool:
    """Whether a value looks like a key, a token, or an address with a password in it, whatever its name is."""
    if _MARKED.search(value) or _UUID.search(value) or _USER_INFO.search(value):
        return True
    if any(names_secret(unquote(name or flag)) for name, flag in _PAIR.findall(value)):
        return True
    # Folders of package stores are named by a hash.
    return _PATH.fullmatch(value) is None and any(is_random(run) for run in _RUN.findall(value))


def is_random(run: str, *, shortest: int = _LONG_RUN) -> bool:
    """Whether letters and digits change so often that nobody chose them as a name."""
    return len(run) >= shortest and len(_EDGE.findall(run)) >= _EDGES


def is_filler(value: str) -> bool:
    """Whether a value only says that something belongs here: `<your token>`, `YOUR_API_KEY`, `xxx`."""
    return _FILLER.fullmatch(value.strip()) is not None and not _MARKED.search(value)


def _is_file(value: str) -> bool:
    """Whether a value is the path of a file, and not a secret that happens to have slashes."""
    runs = _RUN.findall(value)
    return _FILE.fullmatch(value) is not None and not any(is_random(run, shortest=_SHORT_RUN) for run in runs)
