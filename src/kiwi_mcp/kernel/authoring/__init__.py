"""Authoring: items created, changed, checked, signed and removed, with nothing half done and nothing lost."""

from kiwi_mcp.kernel.authoring.author import Author

__all__ = ["Author"]
