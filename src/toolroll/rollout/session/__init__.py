"""The token tree of one session, and its single writer."""

from toolroll.rollout.session.path import SessionPath
from toolroll.rollout.session.session import Session

__all__ = ["Session", "SessionPath"]
