"""Engine, chat templates, sessions, runs and the endpoint: everything between a parser and an
agent.
"""
