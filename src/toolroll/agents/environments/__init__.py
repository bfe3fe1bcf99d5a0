"""The environments of the library, and adapters for environments with other interfaces."""
