"""The bodies of requests: their JSON, their fields, and what they ask of the engine."""
