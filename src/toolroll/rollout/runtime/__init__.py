"""Helpers that are not specific to rollouts, such as threads, files, JSON and time limits."""
