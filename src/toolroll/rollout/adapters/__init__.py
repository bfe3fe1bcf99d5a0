"""One package per RL framework. Each package has the functions that the framework's trainer calls,
and converts an `InteractionResult` to the framework's samples.
"""
