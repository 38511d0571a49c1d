"""The gateway: what Kiwi serves over HTTP."""
