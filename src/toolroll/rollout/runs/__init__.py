"""Many episodes, and what they leave on disk."""
