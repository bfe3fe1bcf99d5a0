"""Stands in for torchvision, whose PyPI wheel does not load beside the CPU build of torch (operator
torchvision::nms is missing).

SGLang imports it for image models only: every name is there, and raises when called.
"""

from torchvision._absent import Absent, absent

__version__ = "0.28.0"


def __getattr__(name: str) -> Absent:
    return absent(__name__, name)
