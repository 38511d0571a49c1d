"""Verbs of the group `mcp`."""
