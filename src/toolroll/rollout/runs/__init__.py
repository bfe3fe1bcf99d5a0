"""Runs of many episodes, and their files."""
