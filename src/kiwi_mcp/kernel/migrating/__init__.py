"""Migrating: items of an old folder, brought along as they are or in the form of today."""

from kiwi_mcp.kernel.migrating.migrate import migrate

__all__ = ["migrate"]
