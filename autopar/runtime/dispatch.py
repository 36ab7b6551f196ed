"""The mode in which each op is seen as it runs.

It is documented, but torch has no public name for it: the private one is used here alone.
"""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
