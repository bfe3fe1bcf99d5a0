"""Engine, chat templates, sessions, runs and the endpoint: everything between the parsers and the
agents.
"""
