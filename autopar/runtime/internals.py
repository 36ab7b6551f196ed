"""Names of torch that are documented but lie in private modules, imported here alone.

`tree_*`: nested tuples, lists and dicts as the list of their leaves, and back; torch's know of its own containers too.
`TorchDispatchMode`: sees each op as it runs.
"""

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["TorchDispatchMode", "tree_flatten", "tree_leaves", "tree_unflatten"]
