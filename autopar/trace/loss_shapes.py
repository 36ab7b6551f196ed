"""Classification losses without a reduction: on meta, torch gives those of a symbolic number of rows no dims at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ..ir.graph import arguments, info, update_info
from ..rules.arguments import option
from ..rules.losses import NONE

aten = torch.ops.aten


class LossShapes(TorchFunctionMode):
    """Within: such a loss is expanded to a term for each row, so that the trace goes on with the right shape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (F.cross_entropy, F.nll_loss) and kwargs.get("reduction") == "none":
            target: Tensor = kwargs["target"] if "target" in kwargs else args[1]
            if result.dim() < target.dim() and not target.is_floating_point():
                return result.expand(target.shape)
        return result


def correct_shape(node: fx.Node) -> None:
    """Give the loss itself the shape of its targets: the expansion then does nothing, and `clean` drops it."""
    if node.target in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default) and option(node, "reduction") == NONE:
        target = info(arguments(node)[1])
        if not target.dtype.is_floating_point:
            update_info(node, shape=target.shape)
