"""Compare runs, paired by task and sample."""

from toolroll.evaluation.compare.comparison import SIGNIFICANT, Question, compare
from toolroll.evaluation.compare.run import ComparedRun, read_runs

__all__ = ["SIGNIFICANT", "ComparedRun", "Question", "compare", "read_runs"]
