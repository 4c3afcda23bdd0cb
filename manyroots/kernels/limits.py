"""What one launch can hold; `models/kernel_set.py` refuses larger steps at start."""

MAX_GRID_SIDE = 65_535
"""Of a grid's second and third sides, by CUDA."""
NUM_COUNTERS = 65_536
"""Counters by which programs of one launch find out who is last: one for each row and key-value
head that attend."""
