"""Storing a product's numbers, filling them from a checkpoint and cutting them for a rank."""
