"""Steps on a GPU; see README.md."""
