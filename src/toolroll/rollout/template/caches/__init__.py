"""Optimizations that do not affect tokens. Skip this package if you review correctness."""
