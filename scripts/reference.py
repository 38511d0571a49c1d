"""Writes the reference pages that are made from code; with `--check` it only says whether they are current."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.threads import EXIT_CODES

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"

ERRORS_HEAD = """\
# Errors

Everything Kiwi refuses is answered with one object: `error`, `code`, `item_type`, `message`, `suggestion`, and details
that belong to the code. Codes are stable. A tool that ran and failed is not among them: that is a result, and
the command exits with 1. A command line that is not understood exits with 2, Ctrl-C with 130.

This page is made by `scripts/reference.py` from `domain/errors.py`.
"""


THREADS_HEAD = """\
## Exit codes of threads

A command that waits for a thread (`kiwi thread start|answer|resume --wait`, `kiwi thread watch`, `kiwi run --mode
thread`) ends with 0 if the thread is `completed`, and with 130 if Ctrl-C stopped it. Otherwise:

| Status | Exit |
|---|---|
"""
_STATUSES = {"approval": "waiting for an approval", "waiting": "waiting for an answer"}


def errors_page() -> str:
    """The error codes, one table for each family."""
    return "\n".join([ERRORS_HEAD, *map(_family, KiwiError.__subclasses__()), _threads()])


def _threads() -> str:
    rows = [f"| {_STATUSES.get(status, status)} | {code} |\n" for status, code in EXIT_CODES.items()]
    return f"{THREADS_HEAD}{''.join(rows)}"


def _family(base: type[KiwiError]) -> str:
    heading = (
        f"## {base.error}\n\n{_sentence(base)}\n\n| Code | Error | Meaning | HTTP | Exit |\n|---|---|---|---|---|\n"
    )
    return heading + "".join(map(_row, _members(base)))


def _members(base: type[KiwiError]) -> Iterator[type[KiwiError]]:
    yield base
    for child in base.__subclasses__():
        yield from _members(child)


def _row(kind: type[KiwiError]) -> str:
    return f"| `{kind.code}` | {kind.error} | {_sentence(kind)} | {kind.http_status} | {kind.exit_code} |\n"


def _sentence(kind: type[KiwiError]) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


PAGES: Mapping[str, Callable[[], str]] = {"errors.md": errors_page}


def stale_pages() -> list[str]:
    """The names of the pages that say something else than the code."""
    return [name for name, page in PAGES.items() if _written(FOLDER / name) != page()]


def _written(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    """Write what is stale, or list it."""
    stale = stale_pages()
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/reference/{name} is stale.\nhint: run `make reference`.", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote docs/reference/{name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
