"""Clients of others, untouched, against a real server: `python -m tests.clients`."""
