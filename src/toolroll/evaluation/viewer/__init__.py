"""`toolroll view`: shows a run as one HTML page that works without a network. `toolroll compare`
shows several in such a page.
"""

from toolroll.evaluation.viewer.page import PageRun, ShownTokens, write_page, write_side_by_side

__all__ = ["PageRun", "ShownTokens", "write_page", "write_side_by_side"]
