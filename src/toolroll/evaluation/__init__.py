"""Look at finished runs: compare, regrade, judge, check environments, export, and a page."""
