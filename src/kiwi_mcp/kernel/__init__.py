"""The order of things: the pipeline, the verbs, and where the parts are joined."""

from kiwi_mcp.kernel.kernel import Kernel, UnsignedItem
from kiwi_mcp.kernel.verb import Answer

__all__ = ["Answer", "Kernel", "UnsignedItem"]
