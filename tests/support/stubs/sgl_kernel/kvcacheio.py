"""SGLang before 0.5.15 imports names from it on a CPU too."""

from sgl_kernel import __getattr__ as __getattr__
