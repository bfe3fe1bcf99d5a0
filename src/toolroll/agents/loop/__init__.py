"""The loop of an episode: what the agents share."""
