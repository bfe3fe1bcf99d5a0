"""`toolroll view`: shows a run as one HTML page that works without a network."""

from toolroll.rollout.runs.viewer.page import write_page

__all__ = ["write_page"]
