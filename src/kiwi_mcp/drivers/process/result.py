"""What a process said, as an outcome."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from signal import Signals
from typing import Literal, NoReturn

from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.outcome import Logs, Outcome
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.primitives.subprocess import ProcessResult

_DEEPEST = 200
"""The deepest nesting of a result: deeper ones break programs that read it later."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SUGGESTIONS = {
    "error": "The logs hold all that it said; mend the tool or the parameters, then run it again.",
    "timeout": "Give it less to do, or a longer `config.timeout`.",
}


class NotJson(ValueError):
    """Text that was to be JSON and is not, or cannot be passed on."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A result, and whether characters that no text can hold were replaced in it."""

    value: Json
    is_mended: bool = False


@dataclass(frozen=True, slots=True)
class Hearing:
    """How to understand one process: where its result is, and whose files the folders it names really are."""

    tool_id: str
    result_from: str
    homes: Mapping[str, str]
    spec: ProcessSpec

    def outcome(self, process: ProcessResult) -> Outcome:
        """Return what happened."""
        if process.timed_out:
            return self._failed(process, "timeout", f"did not end within {self.spec.timeout:g} seconds and was stopped")
        if process.exit_code != 0:
            return self._failed(process, "error", _ending(process))
        if process.is_result_truncated:
            return self._failed(process, "error", f"gave a result of more than {self.spec.result_limit:,} bytes")
        try:
            return self._succeeded(process)
        except NotJson as fault:
            return self._failed(process, "error", f"gave a result that is not JSON: {fault}")

    def _succeeded(self, process: ProcessResult) -> Outcome:
        is_spoken = not process.result and self.result_from != "channel"
        heard = self._hear(process)
        return Outcome(
            "success",
            heard.value,
            logs=self._logs(process, is_stdout_shown=not is_spoken),
            exit_code=0,
            details={"replaced_characters": True} if heard.is_mended else {},
        )

    def _hear(self, process: ProcessResult) -> Heard:
        """Return the result: from the channel where anything came through it, else as the runtime says."""
        if process.result:
            return parse(process.result)
        match self.result_from:
            case "channel":
                return Heard(None)
            case "json_stdout":
                return parse(process.stdout)
            case _:
                return _json_or_text(process.stdout)

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


def parse(output: bytes) -> Heard:
    """Return strict JSON: no NaN or infinity, no deep nesting, no halves of characters."""
    text, is_mended = _decoded(output)
    try:
        value: Json = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    except ValueError as error:
        raise NotJson(str(error)) from error
    if text.count("[") + text.count("{") > _DEEPEST and _depth(value) > _DEEPEST:
        raise NotJson(f"it is nested more than {_DEEPEST} levels deep")
    return _whole(value, is_mended=is_mended) if _SURROGATE.search(text) else Heard(value, is_mended)


def _json_or_text(output: bytes) -> Heard:
    try:
        return parse(output)
    except NotJson:
        text, is_mended = _decoded(output)
        # As in a shell, the newline that ends the last line is not part of what was said.
        return Heard(text.removesuffix("\n"), is_mended)


def _decoded(output: bytes) -> tuple[str, bool]:
    try:
        return output.decode("utf-8"), False
    except UnicodeDecodeError:
        return output.decode("utf-8", errors="replace"), True


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in {float("inf"), float("-inf")}:
        raise ValueError(f"{digits[:40]} is too large for a number")
    return number


def _depth(value: Json) -> int:
    """Return how deep a value is nested, counted without recursion."""
    level, depth = [value], 0
    while level := [child for node in level for child in _children(node)]:
        depth += 1
    return depth


def _children(node: Json) -> Iterable[Json]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _whole(value: Json, *, is_mended: bool) -> Heard:
    """Return the value without lone surrogates, which escapes can write and no file or protocol can carry."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        mended: Json = json.loads(text.encode("utf-8", errors="replace"))
        return Heard(mended, is_mended=True)
    return Heard(value, is_mended)


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
