"""The MCP server: the official SDK over the kernel, and on stdio a first stage that greets at once."""
