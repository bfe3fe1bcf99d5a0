"""One package for each RL framework: it converts an `InteractionResult` to the framework's samples,
and has the functions that its trainer calls.
"""
