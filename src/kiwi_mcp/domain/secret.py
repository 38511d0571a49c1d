"""A secret value that does not print itself, and secrets in a configuration: names and known forms of tokens.

Taking an ordinary word for a secret costs the owner a line in a file; the other mistake writes a key into a manifest.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import NoReturn
from urllib.parse import unquote

from kiwi_mcp.domain.patterns import lazy_pattern

_WORD = lazy_pattern(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = frozenset(
    {"key", "token", "secret", "secrets", "password", "passwd", "passphrase", "pass", "pwd", "auth", "authorization"}
    | {"credential", "credentials", "cookie", "pat", "bearer", "apikey", "dsn", "jwt", "signature", "webhook"}
    | {"passcode", "pin", "otp", "cvv", "cvc"}
)
_SECRET_ENDINGS = ("token", "secret", "password", "passwd", "passphrase", "apikey", "credentials")
# `AUTH_MODE`, `TOKEN_LIMIT`, `KEY_FILE` speak about a secret and hold none.
_ABOUT = frozenset(
    {"file", "path", "dir", "directory", "folder", "mode", "type", "method", "scheme", "limit", "ttl", "timeout"}
    | {"size", "count", "provider", "enabled", "host", "port", "header", "name", "prefix", "domain", "algorithm"}
)
_PLAIN_VALUES = frozenset({"", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null"})
# A form begins a word: `task_list_server` holds no `sk_…`.
_KNOWN_FORMS = lazy_pattern(
    r"(?<![A-Za-z0-9])(?:(?:sk|pk|rk)[-_][A-Za-z0-9_-]{8,}|gh[opsur]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[a-z]-[\w-]{8,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{16,}|ya29\.[\w-]{8,}|eyJ[\w-]{8,}\.[\w.-]+|-----BEGIN |npm_\w{16,}"
    r"|pypi-[\w-]{16,}|hf_\w{8,}|sbp_\w{8,}|SG\.[\w-]{8,}|dop_v1_\w{8,}|ntn_\w{8,}|secret_\w{8,}|figd_[\w-]{8,}"
    r"|lin_api_\w{8,}|tvly-[\w-]{8,}|(?:Bearer|Basic)\s+[\w.~+/=-]{8,})"
)
_UUID = lazy_pattern(r"(?i)(?<![0-9a-f])[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}(?![0-9a-f])")
_USER_INFO = lazy_pattern(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@")
# `?token=…` of an address, `TOKEN=…` and `--token …` of a line for a shell.
_PAIR = lazy_pattern(r"(?:^|[?&;\s])(?:([^=&;?#\s]+)=[^&#\s]|(--?[A-Za-z][\w-]*)\s+[^\s-])")
# Base64 may begin with a slash, so that an absolute path must begin with the name of a folder.
_FILE = lazy_pattern(r"(?:~|\.{1,2})/\S*|/(?:[a-z]{2,}|Users|Volumes|Library)/\S*|[A-Za-z]:[\\/].*")
_LABEL = lazy_pattern(
    r"(?i)pass ?(?:word|phrase|code)|\b(?:api|access|private|secret|ssh|recovery|encryption)[ -]?key"
    r"|\btoken\b(?! (?:count|limit))|\bsecrets?\b|credentials?"
    r"|\b(?:pin|otp|cvv|cvc)\b|(?:one.time|verification|security) code"
)
_FILLER = lazy_pattern(
    r"(?i)<.*>|\[.*\]|\.{3,}|…+|\*+|x{3,}|(?:your|my|the|insert|replace|enter|put|add|paste)[-_ ].*|.*[-_ ]here"
    r"|change[-_ ]?me|todo|placeholder|example"
)


def names_secret(name: str) -> bool:
    """Whether a value under this name is a secret: `GITHUB_TOKEN`, `apiKey`, `X-Api-Key`, `--password`."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT:
        return False
    return any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words)


def labels_secret(label: str) -> bool:
    """Whether a label that a person reads asks for a secret: `Your password`, `API key`."""
    return _LABEL.search(label) is not None


def is_secret(name: str, value: str) -> bool:
    """Whether a value is a secret, by its name or by its form."""
    if looks_secret(value):
        return True
    return names_secret(name) and value.strip().lower() not in _PLAIN_VALUES and not _FILE.fullmatch(value)


def looks_secret(value: str) -> bool:
    """Whether a value looks like a key, a token, or an address with a password in it, regardless of its name."""
    if _KNOWN_FORMS.search(value) or _UUID.search(value) or _USER_INFO.search(value):
        return True
    return any(names_secret(unquote(name or flag)) for name, flag in _PAIR.findall(value))


def is_filler(value: str) -> bool:
    """Whether a value is only a placeholder: `<your token>`, `YOUR_API_KEY`, `xxx`."""
    return _FILLER.fullmatch(value.strip()) is not None and not _KNOWN_FORMS.search(value)


class Secret:
    """A value that is revealed only on request: not by printing, formatting, comparing or pickling."""

    __slots__ = ("__value",)

    def __init__(self, value: str) -> None:
        self.__value = value

    def reveal(self) -> str:
        """Return the value itself."""
        return self.__value

    def is_same(self, other: Secret) -> bool:
        """Whether two secrets have one value."""
        return compare_digest(self.__value.encode(errors="surrogatepass"), other.__value.encode(errors="surrogatepass"))

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A secret is not written anywhere.")
