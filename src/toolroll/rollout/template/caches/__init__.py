"""Optimizations that do not affect tokens. You can skip this package if you review correctness."""
