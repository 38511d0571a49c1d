"""Kiwi: a kernel for AI, where tools live and through which every model and program uses them."""

__version__ = "0.1.0"
