"""Syntax: a runtime's own opinion about a tool's entrypoint, by its `check` words."""

from __future__ import annotations

import re

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import CommandMissing, InvalidManifest, IsolationUnavailable, Unavailable
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.held import held_by
from kiwi_mcp.drivers.process.bind import KINDS
from kiwi_mcp.drivers.process.environments import Environment
from kiwi_mcp.drivers.process.facts import check_words, facts_of, fill
from kiwi_mcp.drivers.process.snapshot import take_snapshot
from kiwi_mcp.drivers.process.surroundings import base_env, find_program
from kiwi_mcp.drivers.words import read_words
from kiwi_mcp.manifest.render import escape
from kiwi_mcp.primitives import subprocess

_TIMEOUT = 60.0
_COMPLAINT = re.compile(r"error", re.IGNORECASE)
_FIX = "Mend the line, then validate again."


async def check_syntax(chain: Chain, space: Space) -> tuple[Issue, ...]:
    """Return what is wrong with the entrypoint; nothing where the runtime has no words to find out."""
    words = read_words(chain.executor)
    if not words.check or not chain.tool.entrypoint:
        return ()
    try:
        check_words(chain, words.check)
    except InvalidManifest as invalid:
        return invalid.issues
    # Dependencies play no part in syntax: the bare interpreter of the environment is enough.
    kind = KINDS.get(words.environment)
    environment = kind.bare() if kind else Environment()
    facts = facts_of(chain, space, environment)
    program, *arguments = fill(words.check, facts)
    try:
        argv = (find_program(program, words, environment), *arguments)
    except CommandMissing as missing:
        return (_unchecked(chain, missing),)
    for link in (chain.tool, chain.executor):
        take_snapshot(link, space.cache)
    env = {**base_env(chain, space, environment), "NO_COLOR": "1"}
    escaped = {name: escape(value) for name, value in env.items()}
    spec = ProcessSpec(argv=argv, cwd=facts["tool.files"], env=escaped, timeout=_TIMEOUT)
    # A runtime's words may come from anybody, and so may what it is asked to look at.
    jail = Jail("sandboxed", readable=(facts["tool.files"], facts["runtime.files"]))
    try:
        held = await held_by(jail, space)
        result = await held.run(spec, secrets={}, report=silent)
    except IsolationUnavailable as missing:
        return (_unchecked(chain, missing),)
    return _issues(chain.tool.entrypoint, facts["tool.files"], result)


def _unchecked(chain: Chain, missing: Unavailable) -> Issue:
    reason = f"the syntax was not checked: {missing.message}"
    return Issue(chain.tool.entrypoint, reason, missing.suggestion, severity="warning")


def _issues(entrypoint: str, folder: str, result: subprocess.ProcessResult) -> tuple[Issue, ...]:
    if result.timed_out:
        fix = "Make the file smaller, or look what the check waits for."
        return (Issue(entrypoint, f"the syntax check did not end within {_TIMEOUT:.0f} seconds", fix),)
    if result.exit_code == 0:
        return ()
    said = (result.stderr + b"\n" + result.stdout).decode("utf-8", errors="replace")
    line = _line(said, f"{folder}/{entrypoint}")
    place = f"{entrypoint}:{line}" if line else entrypoint
    return (Issue(place, _reason(said, folder), _FIX, line=line),)


def _line(said: str, path: str) -> int | None:
    """Return the line that a complaint names: `file:3`, `file: line 3` or `file", line 3`."""
    found = re.search(rf'{re.escape(path)}(?:"?[,:] line |:)(\d+)', said)
    return int(found[1]) if found else None


def _reason(said: str, folder: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    complaint = next((line for line in lines if _COMPLAINT.search(line)), lines[-1] if lines else "is not valid")
    return complaint.replace(f"{folder}/", "")[:500]
