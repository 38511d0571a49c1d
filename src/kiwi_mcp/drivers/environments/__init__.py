"""Packages that tools need, installed once, as data says."""
