"""Engines: who runs a thread, and when. The loop itself is `kernel/threads/loop.py`."""
