"""The store: data that Kiwi keeps between calls."""
