"""The answers of the engine as bodies and as streams."""
