"""The registry: immutable versions of items, in the database."""
