"""Which replica computes a request."""
