"""Engine, chat template and parser as one model, and the conversations with it."""
