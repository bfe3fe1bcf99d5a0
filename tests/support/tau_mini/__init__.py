"""A small benchmark with the interface of tau-bench (commit 59a200c6): its names, signatures and
flaws, with our own words and data.

Intended flaws: a step after the end is rewarded, `calculate` evaluates Python, the database is
loaded at creation, at every reset and for the reward, and `litellm` is imported at import.
"""

from support.tau_mini.envs.base import Env

__all__ = ["Env"]
