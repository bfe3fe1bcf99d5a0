"""An environment that needs eyes, and a small vision model that learns to play it with toolroll's
samples.
"""
