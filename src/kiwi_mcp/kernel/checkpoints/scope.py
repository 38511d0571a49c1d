"""What is never saved: secrets, what Kiwi keeps itself, and the inside of repositories."""

from __future__ import annotations

from fnmatch import fnmatchcase

SECRETS = (
    ".env", ".env.*", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "*.p8", "*.jks", "*.keystore", "*.kdbx", "*.ppk",
    "*.gpg", "*.age", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".npmrc", ".pypirc",
    ".pgpass", ".htpasswd", ".git-credentials", "credentials", "credentials.*", "secrets.*", "*.tfstate",
)  # fmt: skip
"""Names of files that hold secrets as a rule; the case of letters makes no difference."""
FOLDERS = frozenset({".git", ".ssh", ".gnupg", ".aws", ".azure", ".gcloud", ".kube", ".docker", ".trash"})
OWN = (".ai/state", ".ai/outputs", ".ai/logs")
"""What Kiwi itself writes while tools run."""


def is_left_out(path: str) -> bool:
    """Whether nothing at a path is ever saved."""
    parts = path.lower().split("/")
    if not FOLDERS.isdisjoint(parts):
        return True
    if any(path == own or path.startswith(f"{own}/") or f"/{own}/" in f"/{path}/" for own in OWN):
        return True
    return any(fnmatchcase(parts[-1], pattern) for pattern in SECRETS)
