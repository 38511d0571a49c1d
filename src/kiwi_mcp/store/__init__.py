"""Durable memory: what Kiwi keeps between calls."""
