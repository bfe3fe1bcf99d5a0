"""The library's environments, and adapters for environments with different interfaces."""
