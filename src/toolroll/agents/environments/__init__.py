"""The environments that come with the library, and the adapters for those of others."""
