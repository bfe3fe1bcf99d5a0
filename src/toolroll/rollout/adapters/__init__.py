"""One package for each RL framework: an `InteractionResult` in its own form, and the hook that
its trainer calls.
"""
