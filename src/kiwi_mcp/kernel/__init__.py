"""The order of things: the pipeline, the verbs, and where the parts are joined."""

from kiwi_mcp.kernel.answers import Answer
from kiwi_mcp.kernel.kernel import Kernel

__all__ = ["Answer", "Kernel"]
