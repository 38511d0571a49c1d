"""What a process said, as an outcome."""

from __future__ import annotations

import re
from collections.abc import Mapping
from signal import Signals
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.isolation import Level
from kiwi_mcp.domain.outcome import Logs, Outcome
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.output import NotJsonOutput, ParsedOutput, json_or_text, parse
from kiwi_mcp.primitives.process.run import ProcessResult

_SUGGESTIONS = {
    "error": "The logs contain all its output. Fix the tool or the parameters, then run it again.",
    "timeout": "Give it less to do, or a longer `config.timeout`.",
}


_OUT_OF_REACH = lazy_pattern(
    r"no such file|file ?not ?found|enoent|read-only file system|erofs|permission denied|eacces|not permitted"
    r"|network is unreachable|enetunreach|connection refused|econnrefused|name resolution|not resolve|eai_again"
    r"|name or service not known|enotfound|address family not supported|eafnosupport",
    re.IGNORECASE,
)
_NEEDS = (
    "It runs in a sandbox, where it sees no file and reaches no host that it did not ask for: name them under `needs` "
    "of its manifest (`read`, `write`, `hosts`); `kiwi help isolation` shows how."
)


def with_needs(outcome: Outcome, level: Level) -> Outcome:
    """Return an outcome that says, where a sandbox may be why the tool failed, how it is given what it needs."""
    is_held = level in {"sandboxed", "restricted"} and outcome.status == "error"
    if is_held and _OUT_OF_REACH.search(f"{outcome.message}\n{outcome.logs.stderr}"):
        return replace(outcome, suggestion=f"{_NEEDS} {outcome.suggestion}".strip())
    return outcome


class Hearing(Struct, frozen=True):
    """How to interpret one process: where its result is, and which real folders its folder names stand for."""

    tool_id: str
    result_from: str
    homes: Mapping[str, str]
    spec: ProcessSpec

    def outcome(self, process: ProcessResult) -> Outcome:
        """Return what happened."""
        if process.stopped:
            return self._failed(process, "error", f"{process.stopped}, and was stopped")
        if process.timed_out:
            return self._failed(process, "timeout", f"did not end within {self.spec.timeout:g} seconds and was stopped")
        if process.exit_code != 0:
            return self._failed(process, "error", _ending(process))
        if process.is_result_truncated:
            return self._failed(process, "error", f"gave a result of more than {self.spec.result_limit:,} bytes")
        try:
            return self._succeeded(process)
        except NotJsonOutput as fault:
            return self._failed(process, "error", f"gave a result that is not JSON: {fault}")

    def _succeeded(self, process: ProcessResult) -> Outcome:
        is_spoken = not process.result and self.result_from != "channel"
        heard = self._hear(process)
        return Outcome(
            "success",
            heard.value,
            logs=self._logs(process, is_stdout_shown=not is_spoken),
            exit_code=0,
            details={"replaced_characters": True} if heard.is_repaired else {},
        )

    def _hear(self, process: ProcessResult) -> ParsedOutput:
        """Return the result: from the channel where anything came through it, else as the runtime says."""
        if process.result:
            return parse(process.result)
        match self.result_from:
            case "channel":
                return ParsedOutput(None)
            case "json_stdout":
                return parse(process.stdout)
            case _:
                return json_or_text(process.stdout)

    def _failed(self, process: ProcessResult, status: Literal["error", "timeout"], what: str) -> Outcome:
        logs = self._logs(process)
        last = _last_line(logs.stderr)
        return Outcome(
            status,
            message=f"`{self.tool_id}` {what}{f': {last}' if last else '.'}",
            suggestion=_SUGGESTIONS[status],
            logs=logs,
            exit_code=process.exit_code,
            details={"signal": _signal(process.signal)} if process.signal else {},
        )

    def _logs(self, process: ProcessResult, *, is_stdout_shown: bool = True) -> Logs:
        return Logs(
            stdout=self._at_home(process.stdout) if is_stdout_shown else "",
            stderr=self._at_home(process.stderr),
            stdout_bytes=process.stdout_bytes,
            stderr_bytes=process.stderr_bytes,
            is_truncated=process.is_truncated,
        )

    def _at_home(self, output: bytes) -> str:
        """Return output as text that names the author's files, not the copies that ran."""
        text = output.decode("utf-8", errors="replace")
        for folder, home in self.homes.items():
            text = text.replace(folder, home)
        return text


def _ending(process: ProcessResult) -> str:
    if process.signal:
        return f"was ended by {_signal(process.signal)}"
    return f"ended with exit code {process.exit_code}"


def _signal(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:500] if lines else ""
