"""The token tree of one session, and the only class that writes to it."""

from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session

__all__ = ["Session", "SessionPath"]
