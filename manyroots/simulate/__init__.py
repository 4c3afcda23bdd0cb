"""The real scheduler and cache under a virtual clock; see `simulation.py`."""
