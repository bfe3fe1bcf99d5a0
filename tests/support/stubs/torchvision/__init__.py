"""Replace torchvision, whose PyPI wheel does not load with the CPU build of torch (operator
torchvision::nms is missing).

SGLang imports it only for image models: every name exists, and raises when called.
"""

from torchvision._absent import Absent, absent

__version__ = "0.28.0"


def __getattr__(name: str) -> Absent:
    return absent(__name__, name)
