"""The parsers of the wire formats, and their base classes. Similar formats share a file."""
