"""What only saves time. Whoever wants to trust the tokens may skip it."""
