"""Helpers that are not specific to rollouts: threads, files, JSON, time limits."""
