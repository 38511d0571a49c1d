"""One command, from its arguments to its exit code."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from kiwi_mcp.domain.errors import InvalidRequest, KiwiError
from kiwi_mcp.domain.json import Json
from kiwi_mcp.surfaces.cli.help import UsageError, find
from kiwi_mcp.surfaces.cli.inputs import parse, read
from kiwi_mcp.surfaces.cli.screen import show_error

if TYPE_CHECKING:
    from kiwi_mcp.surfaces.cli.rows import CommandRow

Action: TypeAlias = "Callable[[CommandRow, Mapping[str, Json]], int]"
_USAGE = 2


def main(words: Sequence[str], load: Callable[[str], object]) -> None:
    """Carry out a command and end with its exit code; a refusal is shown like any other answer."""
    is_json = "--json" in words or [*words[:1]] == ["call"]
    try:
        row, rest = find(words)
        options = read(row, parse(row, rest))
        module, name = row["run"].split(".")
        action: Action = getattr(load(f"cli.{module}"), name)
        sys.exit(action(row, options))
    except UsageError as error:
        fault = InvalidRequest(str(error), suggestion=error.suggestion)
        show_error(fault.to_response(), is_json=is_json)
        sys.exit(_USAGE)
    except KiwiError as error:
        show_error(error.to_response(), is_json=is_json)
        sys.exit(error.exit_code)
    except EOFError:  # a question was closed without an answer
        sys.exit(1)
    except BrokenPipeError:
        # The reader has left. What is still buffered must not fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        gc.freeze()  # the process ends: nothing needs to be collected
