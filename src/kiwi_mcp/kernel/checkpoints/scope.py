"""What is never saved: secrets, what Kiwi keeps itself, and the inside of repositories."""

from __future__ import annotations

import re
from fnmatch import translate

SECRETS = (
    ".env", ".env.*", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "*.p8", "*.jks", "*.keystore", "*.kdbx", "*.ppk",
    "*.gpg", "*.age", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".npmrc", ".pypirc",
    ".pgpass", ".htpasswd", ".git-credentials", "credentials", "credentials.*", "secrets.*", "*.tfstate",
)  # fmt: skip
"""Names of files that hold secrets as a rule; the case of letters makes no difference."""
FOLDERS = frozenset({".git", ".ssh", ".gnupg", ".aws", ".azure", ".gcloud", ".kube", ".docker", ".trash"})
OWN = (".ai/state", ".ai/outputs", ".ai/logs")
"""What Kiwi itself writes while tools run."""


_SECRET = re.compile("|".join(map(translate, SECRETS)))
_OWN = re.compile(f"(?:^|/)(?:{'|'.join(map(re.escape, OWN))})(?:/|$)")


def is_left_out(path: str) -> bool:
    """Whether nothing at a path is ever saved."""
    parts = path.lower().split("/")
    return (
        not FOLDERS.isdisjoint(parts)
        or _SECRET.match(parts[-1]) is not None
        or _OWN.search("/".join(parts)) is not None
    )
