"""Programs as agents: coding agents that run in a sandbox and call the model over HTTP."""
