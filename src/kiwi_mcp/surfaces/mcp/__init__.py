"""The MCP server over stdio: a first stage that greets at once, and the official SDK behind it."""
