"""Replace triton's wheel of 1 GB. SGLang imports it for kernels that need a GPU; on the CPU none of
them runs.
"""

from absent import replace

replace(__name__, "0.0.0", decorates=True)
