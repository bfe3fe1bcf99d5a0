"""Export a run: training samples as a data set, episodes as trajectories, or results in the formats
of tau-bench, Inspect and lm-eval.
"""
