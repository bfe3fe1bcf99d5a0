"""Export a run: training samples as a Parquet data set, or results in tau-bench's format."""

from toolroll.rollout.runs.export.dataset import write_dataset
from toolroll.rollout.runs.export.tau_bench import tau_bench_results

__all__ = ["tau_bench_results", "write_dataset"]
