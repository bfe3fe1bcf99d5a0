"""Export a run: training samples as a data set, or episodes as trajectories."""
