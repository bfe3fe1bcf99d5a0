"""A served model (engine, chat template and parser), and conversations with it."""
