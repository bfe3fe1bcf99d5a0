"""The loop of an episode, which all agents share."""
