"""One wire format a file, and the shapes that formats share."""
