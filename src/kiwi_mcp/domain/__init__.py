"""Frozen types, pure functions and errors. This package imports no other package of Kiwi."""
