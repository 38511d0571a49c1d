"""Files that are never saved: secrets by name, and files of Kiwi."""

from __future__ import annotations

import pytest

from kiwi_mcp.kernel.checkpoints.git_store import is_left_out


@pytest.mark.req("K-GI-02")
@pytest.mark.parametrize(
    "path",
    [
        ".env", "deploy/.env.production", ".ENV", "tls/Server.PEM", "id_rsa", "keys/id_ed25519.pub", "a/b.key",
        ".netrc", ".npmrc",
        "credentials.json", ".ssh/config", "home/.aws/x", ".git/config", "sub/.git/hooks/pre-commit",
        ".ai/state/x", ".ai/state", "nested/.ai/outputs/tools/x.json", ".ai/.trash/old/tool.yaml", "infra/a.tfstate",
    ],
)  # fmt: skip
def test_secrets_and_files_of_kiwi_are_excluded(path: str) -> None:
    assert is_left_out(path)


@pytest.mark.parametrize(
    "path",
    [
        "environment.py", "src/.envy", "id_map.py", "keyboard.py", "pem.txt", ".github/workflows/ci.yml", ".gitignore",
        ".ai/tools/a.py", ".ai/statement.md", "x.ai/state/y", "credentials/readme.md", "new\nline", ".env\n",
    ],
)  # fmt: skip
def test_similarly_named_files_are_saved(path: str) -> None:
    assert not is_left_out(path)
