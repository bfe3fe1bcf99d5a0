"""The core's environments: tau-bench's, and those that are made from functions."""
