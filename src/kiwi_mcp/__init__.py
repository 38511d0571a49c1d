"""Kiwi: a kernel for AI, where tools live and through which every model and program uses them.

The public Python API is `__all__`: `Kernel`, the types of its answers, callers and thread events, and the errors. Its
names are imported when they are first used, so that `import kiwi_mcp` loads nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for true; the start of `kiwi serve` does not wait for `typing`
if TYPE_CHECKING:
    from kiwi_mcp.domain.calls import Caller
    from kiwi_mcp.domain.errors import (
        Conflict,
        Denied,
        Internal,
        Invalid,
        KiwiError,
        NotFound,
        ToolFailed,
        Unavailable,
        Untrusted,
    )
    from kiwi_mcp.domain.messages import ReplyDelta
    from kiwi_mcp.domain.threads import ThreadEvent
    from kiwi_mcp.kernel.kernel import Kernel
    from kiwi_mcp.kernel.verb import Answer

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Caller",
    "Conflict",
    "Denied",
    "Internal",
    "Invalid",
    "Kernel",
    "KiwiError",
    "NotFound",
    "ReplyDelta",
    "ThreadEvent",
    "ToolFailed",
    "Unavailable",
    "Untrusted",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(name)
    from kiwi_mcp.domain import calls, errors
    from kiwi_mcp.kernel import kernel, verb

    return next(getattr(module, name) for module in (kernel, verb, calls, errors) if hasattr(module, name))
