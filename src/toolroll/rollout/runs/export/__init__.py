"""A run in other people's formats: training samples as a Parquet data set, results as tau-bench
writes them.
"""

from toolroll.rollout.runs.export.dataset import write_dataset
from toolroll.rollout.runs.export.tau_bench import tau_bench_results

__all__ = ["tau_bench_results", "write_dataset"]
