"""Thin shells that translate: the CLI and the MCP server. What one can do, all can."""
