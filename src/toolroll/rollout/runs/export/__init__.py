"""Export a run: training samples as a data set, episodes as trajectories, or results in the formats
of tau-bench, Inspect and lm-eval.
"""

from toolroll.rollout.runs.export.atif import write_atif
from toolroll.rollout.runs.export.dataset import write_dataset
from toolroll.rollout.runs.export.inspect_log import write_inspect_logs
from toolroll.rollout.runs.export.lm_eval import write_lm_eval
from toolroll.rollout.runs.export.recorded_run import RecordedRun
from toolroll.rollout.runs.export.tau_bench import tau_bench_results

__all__ = [
    "RecordedRun",
    "tau_bench_results",
    "write_atif",
    "write_dataset",
    "write_inspect_logs",
    "write_lm_eval",
]
