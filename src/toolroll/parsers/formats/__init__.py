"""The wire formats, one per file, and the base classes that formats share."""
