"""Units of data parallelism: each layer, and the model for what is left."""

from __future__ import annotations

from collections.abc import Iterator

from .graph import Call, Program, Role, info


def read_elsewhere(program: Program) -> Iterator[tuple[str, Call, Call]]:
    """(name, its layer's call, another call) of each parameter of a layer that something else reads too.

    A weight penalty over all parameters does so. A layer's parameters are on its stage, and under ZeRO-3 whole during
    its own forward and backward only.
    """
    layers = {call.path: call for call in program.layer_calls if call.path}
    for call in program.calls:
        for node in program.blocks[call.block].placeholders(Role.PARAMETER):
            name = call.full_name(info(node).ref)
            owner = next((path for path in layers if path != call.path and name.startswith(f"{path}.")), None)
            if owner is not None:
                yield name, layers[owner], call
