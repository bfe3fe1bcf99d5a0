"""A stub: see `torchvision._absent`."""

from torchvision._absent import Absent, absent


def __getattr__(name: str) -> Absent:
    return absent(__name__, name)
