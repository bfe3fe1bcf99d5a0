"""Replace torchvision, whose PyPI wheel does not load with the CPU build of torch (operator
torchvision::nms is missing). SGLang imports it only for image models.
"""

from absent import replace

replace(__name__, "0.28.0")
