"""A model of one million parameters learns the desk on a CPU: `python -m examples.learn_desk`."""
