"""One package for each RL framework. Each has the functions that the framework's trainer calls, and
converts an `InteractionResult` to the framework's samples.
"""
