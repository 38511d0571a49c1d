"""YAML files of the owner: change one section and keep comments and order."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from kiwi_mcp.domain.json import Json
from kiwi_mcp.manifest.owner_file import changing


def rewrite(
    path: Path, section: str, change: Callable[[dict[str, Json]], object], *, check: Callable[[], object]
) -> None:
    """Change the entries of one section of a file, under a lock.

    `check` refuses a file that cannot be parsed; such a file must not be written to. A section that is a list of names
    becomes a mapping, with the value true for each name.
    """

    def change_section(written: dict[str, Any]) -> None:
        entries = written.get(section) or {}
        written[section] = dict.fromkeys(entries, True) if isinstance(entries, list) else entries
        change(written[section])

    rewrite_keys(path, change_section, check=check)


def rewrite_keys(path: Path, change: Callable[[dict[str, Any]], object], *, check: Callable[[], object]) -> None:
    """Change the keys of a file, under a lock; `check` as for `rewrite`."""
    with changing(path) as put:
        check()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        yaml = YAML()
        yaml.preserve_quotes, yaml.width = True, 4_096
        written = yaml.load(text)
        # Nothing is read of a file of comments alone, so they are kept as they are.
        kept = f"{text.rstrip()}\n" if written is None and text.strip() else ""
        written = written or {}
        change(written)
        made = StringIO()
        yaml.dump(written, made)
        put(f"{kept}{made.getvalue()}".encode())
