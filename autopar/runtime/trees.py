"""Nested tuples, lists and dicts as the list of their leaves, and back.

torch has no public name for its trees, which know of its own containers too: the private one is used here alone.
"""

from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_unflatten"]
