"""What came of a call whose other side could not be reached."""

from __future__ import annotations

from kiwi_mcp.domain.errors import LoginRequired, Unavailable
from kiwi_mcp.domain.json import as_text
from kiwi_mcp.domain.outcome import Logs, Outcome


def unavailable(fault: Unavailable) -> Outcome:
    """Return the outcome of a call that nobody was there to answer, with the last words of whoever should have."""
    details = {name: value for name, value in fault.details.items() if name != "stderr"}
    if isinstance(fault, LoginRequired):
        details["code"] = fault.code
    return Outcome(
        "unavailable",
        message=fault.message,
        suggestion=fault.suggestion,
        logs=Logs(stderr=as_text(fault.details.get("stderr"))),
        details=details,
    )
