"""A served model (engine, chat template and parser), and the conversations with it."""
