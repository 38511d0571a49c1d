"""Processes, HTTP requests and secret values. No other package handles them directly."""
