"""One package per RL framework. Each package has the functions or classes that the framework calls
to play episodes, and returns the episodes in the framework's format.
"""
