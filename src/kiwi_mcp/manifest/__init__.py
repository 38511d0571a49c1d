"""Manifests: parsing, type specs, validation, parameters, digests, signatures and templates."""
