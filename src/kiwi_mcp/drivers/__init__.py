"""Drivers: a plan in, an outcome out. The word `driver: process` in data is the module `drivers/process` here."""
