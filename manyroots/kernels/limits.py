"""Limits of one launch; `models/kernel_set.py` refuses larger steps at start."""

MAX_GRID_SIDE = 65_535
"""CUDA's limit for a grid's second and third dimensions."""
NUM_COUNTERS = 65_536
"""Counters by which programs of one launch find the last one: one for each attending row and
key-value head."""
