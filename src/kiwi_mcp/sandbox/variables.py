"""Variables of a confined process: all of them reach it, and those that steer a program's start not its launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.sandbox.profile import HOME, TMP

# What the C library itself distrusts in programs with more rights than their caller: code or files named in them are
# loaded by every program that starts, the launcher outside of the sandbox included.
_STEERING = re.compile(
    r"(?:LD|MALLOC|GLIBC|DYLD)_.*|GCONV_PATH|GETCONF_DIR|HOSTALIASES|LOCALDOMAIN|LOCPATH|NIS_PATH|NLSPATH"
    r"|RESOLV_HOST_CONF|RES_OPTIONS|TZDIR|OUTPUT_CHARSET|LANGUAGE"
)
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def divided(env: Mapping[str, str]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the variables that the launcher passes on, and those that it sets inside without having them itself."""
    inside = {name: value for name, value in env.items() if _STEERING.fullmatch(name) or not _PLAIN.fullmatch(name)}
    if hidden := sorted(name for name, value in inside.items() if "${" in value):
        raise InvalidRequest(
            f"{', '.join(hidden)} would steer how programs start, and cannot hold the value of a secret.",
            suggestion="Give the secret to the tool under a name of its own.",
        )
    passed = {name: value for name, value in env.items() if name not in inside}
    return {**passed, "HOME": HOME, "TMPDIR": TMP}, inside
