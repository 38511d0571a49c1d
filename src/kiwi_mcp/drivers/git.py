"""git as Kiwi runs it: no program that a repository names is started, and nothing is fetched."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.manifest.templates import escape
from kiwi_mcp.primitives.process import run
from kiwi_mcp.primitives.process.run import ProcessResult
from kiwi_mcp.primitives.process.spawn import search_path

SECONDS = 60.0
_MOST_OUTPUT = 128_000_000
_CAREFUL = (
    "--no-pager", "--no-replace-objects", "--no-optional-locks",
    *(word for setting in (
        "core.fsmonitor=false", "core.untrackedCache=false", "core.hooksPath=/dev/null",
        "core.logAllRefUpdates=false", "core.splitIndex=false", "index.sparse=false", "gc.auto=0",
        "core.protectNTFS=false", "core.protectHFS=false", "i18n.commitEncoding=UTF-8", "protocol.allow=never",
        "safe.bareRepository=explicit",
    ) for word in ("-c", setting)),
)  # fmt: skip
"""A repository's own settings may name programs: none of them is started, and nothing is fetched."""
_ENV = {
    "LC_ALL": "C",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    **{f"GIT_{role}_NAME": "Kiwi" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": "kiwi@localhost" for role in ("AUTHOR", "COMMITTER")},
}


async def run_git(
    words: Sequence[str], cwd: str, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> ProcessResult:
    """Run git in a folder, and return how it ended."""
    homes = {"HOME": os.environ.get("HOME", ""), "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME", "")}
    known = {**{name: value for name, value in homes.items() if value}, **(env or {})}
    spec = ProcessSpec(
        argv=("git", *_CAREFUL, *words),
        cwd=cwd,
        # What git sees: where the owner's own settings are, for what they ignore, and no other variable.
        env={"PATH": escape(search_path()), **_ENV, **{name: escape(value) for name, value in known.items()}},
        stdin=stdin,
        timeout=SECONDS,
        output_limit=_MOST_OUTPUT,
    )
    return await run.run(spec)


def git_failed(word: str, result: ProcessResult) -> Unavailable:
    """Return the error of a git command that failed."""
    said = result.stderr.decode(errors="replace").strip().partition("\n")[0].rstrip(".")
    reason = f"took longer than {SECONDS:.0f} seconds" if result.timed_out else said or "failed"
    return Unavailable(f"`git {word}`: {reason}.", suggestion="See that `git status` works in the project.")
