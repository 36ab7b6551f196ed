"""Mixtures of experts: tensor parallelism inside each expert."""

from ..ir.custom import EXPERTS
from .factor import RuleMaker, einsum

# Widths f of the experts shard as those of an MLP do; nothing else does. The router's weights w (n, k) multiply
# summands then, so their gradient is Partial, as is that of the tokens.
RULES: dict[object, RuleMaker] = {
    EXPERTS: einsum(
        "x[n d] i[n k] w[n k] gate[e f d] up[e f d] down[e d f] -> y[n d]", whole="d k e", kind="experts", saves="i w"
    ),
}
