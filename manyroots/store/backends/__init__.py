"""Backends of the storage tier: one file per kind."""
