"""Registries: what is published, and how it travels from one to another."""
