"""The loop that plays one episode. All agents share it."""
