"""Measurements. Each prints what it found and gives a dictionary with its exact workload."""
