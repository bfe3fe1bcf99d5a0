"""The environments of the library, and the adapters for foreign ones."""
