"""Train a model of one million parameters on toolroll's `desk` environment, on a CPU:
`python -m examples.learn_desk`.
"""
