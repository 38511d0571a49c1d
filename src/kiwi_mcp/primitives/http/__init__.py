"""HTTP: requests, streams, addresses, WebSockets."""
