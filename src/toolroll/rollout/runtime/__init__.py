"""What has nothing to do with rollouts: threads, files, JSON, time limits."""
