"""The environments that are not part of the core, and programs as agents."""
