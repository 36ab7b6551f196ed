"""Deep models are traced in the time of three layers: the others of a list are stood in for by one op each.

Of a list of equal layers, the first, second and last are traced as they are. Each layer between is replaced by
the op `autopar::repeat`, which keeps its place, what it is given, and the shape of its result. `split_layers`
then makes it a call of the second layer's block. That is right where the three traced layers are one class and each
stand-in is given what the second layer is given: the same op before that layer keeps it, for passes may prove that
a layer need not read, say, a mask that others need. Anything else raises NotRepeatedError, and the model is traced
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..ir.build import replace_node
from ..ir.graph import MODEL, Call, Program, arguments, info
from ..ir.values import drop_unread
from ..runtime.internals import tree_flatten

_FEWEST = 6  # shorter lists are traced whole
_Key = tuple[str, str]  # (path of a module in its layer, what of it)


class NotRepeatedError(Exception):
    """The layers of a list are not repetitions of one: trace all of them."""


@torch.library.custom_op("autopar::repeat", mutates_args=())
def repeat(hidden: Tensor, others: list[Tensor], index: int) -> Tensor:
    """Stands for a layer, or before the second for what that is given: never run, only traced."""
    return hidden.clone()


@repeat.register_fake
def _(hidden: Tensor, others: list[Tensor], index: int) -> Tensor:
    return torch.empty_like(hidden)


REPEAT = torch.ops.autopar.repeat.default


def is_stand_in(node: fx.Node) -> bool:
    return node.target is REPEAT and arguments(node)[2] > 1


def fold(model: nn.Module) -> bool:
    """Replace the inner layers of the model's lists of equal layers, in place; whether there were any."""
    folded = False
    for layers in [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) >= _FEWEST]:
        indices = _index_attributes(list(layers))
        if indices is None:
            continue
        for layer in (layers[0], layers[1], layers[-1]):  # those that are traced
            for path, name in indices:
                _guard(layer.get_submodule(path), name)
        second = _Second()
        layers[1].register_forward_pre_hook(second.given, with_kwargs=True)
        layers[1].register_forward_hook(second.record)
        for i in range(2, len(layers) - 1):
            layers[i] = _StandIn(layers[i], i, second)
        folded = True
    return folded


class _Second:
    """What the second layer is given besides tensors, and whether it returns its result bare or in a tuple."""

    def __init__(self) -> None:
        self.in_tuple = False
        self._values: list[Any] | None = None

    def given(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the layer: `repeat` keeps in the graph what it is given."""
        if not args or not isinstance(args[0], Tensor):
            raise NotRepeatedError("a layer's first argument is no hidden state")
        hidden, *rest = args
        return (torch.ops.autopar.repeat(hidden, self.others(rest, kwargs), 1), *rest), kwargs

    def others(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors that a layer is given besides its hidden state; all else must be what the second is given."""
        leaves, form = tree_flatten((tuple(args), dict(sorted(kwargs.items()))))
        values = [form, *("a tensor" if isinstance(leaf, Tensor) else leaf for leaf in leaves)]
        if self._values is None:
            self._values = values
        if len(values) != len(self._values) or not all(map(_same, values, self._values)):
            raise NotRepeatedError("layers are given different values")
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def record(self, module: nn.Module, args: Any, result: Any) -> None:
        tensors = [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None]
        if len(tensors) != 1 or tensors[0].shape != args[0].shape:
            raise NotRepeatedError("a layer does not map one hidden state to one of the same shape")
        if tensors[0].dtype != args[0].dtype:
            raise NotRepeatedError("a layer changes the dtype of the hidden state")
        self.in_tuple = isinstance(result, tuple)


def _same(value: Any, other: Any) -> bool:
    """Without comparing symbols, which would fix their sizes."""
    if isinstance(value, torch.SymInt) or isinstance(other, torch.SymInt):
        return str(value) == str(other)
    return value is other or (type(value) is type(other) and bool(value == other))


class _StandIn(nn.Module):
    """Takes a layer's place; attributes that the model reads of its layers are still there."""

    def __init__(self, layer: nn.Module, index: int, second: _Second) -> None:
        super().__init__()
        self._index, self._second = index, second
        for name, value in vars(layer).items():
            if not name.startswith("_") and not isinstance(value, Tensor | nn.Module):
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = torch.ops.autopar.repeat(hidden, self._second.others(args, kwargs), self._index)
        return (result,) if self._second.in_tuple else result


def _index_attributes(layers: list[nn.Module]) -> list[_Key] | None:
    """What differs between the layers, if that is only each one's place in the list; None if more does.

    Equal are the modules, shapes and attributes of all layers but the first, and no parameter is in two.
    """
    owners = [id(p) for layer in layers for p in layer.parameters()]
    facts = [structure(layer) for layer in layers]
    if len(owners) != len(set(owners)) or any(f.keys() != facts[1].keys() for f in facts[2:]):
        return None
    differ = [key for key in facts[1] if any(f[key] != facts[1][key] for f in facts[2:])]
    known = all(key in facts[0] for key in differ)  # the first is traced too
    return differ if known and all(_is_index(key, facts) for key in differ) else None


def structure(layer: nn.Module) -> dict[_Key, Any]:
    """Everything that a layer's forward can depend on. Objects that do not compare equal count as different."""
    found: dict[_Key, Any] = {}
    internal = set(vars(nn.Module())) - {"training"}
    for path, module in layer.named_modules():
        found[path, "class"] = type(module)
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            found[path, f"{name}:tensor"] = (tensor.shape, tensor.dtype, tensor.requires_grad)
        for name, value in vars(module).items():
            if name not in internal:
                found[path, name] = value
    return found


def _is_index(key: _Key, facts: list[dict[_Key, Any]]) -> bool:
    """Whether an attribute is the layer's place in the list."""
    return all(type(f.get(key)) is int and f[key] == i for i, f in enumerate(facts) if i)


def _guard(module: nn.Module, name: str) -> None:
    """From now on, reading the attribute says that layers depend on their place."""
    kind, value = type(module), vars(module)[name]

    def read(self: nn.Module) -> Any:
        if torch.compiler.is_exporting():
            raise NotRepeatedError(f"{kind.__name__} reads {name}")
        return value

    del module.__dict__[name]
    module.__class__ = type(kind.__name__, (kind,), {name: property(read)})


def same_given(program: Program) -> Program:
    """The program without the ops before second layers; NotRepeatedError where a stand-in is given other values.

    program: prepared, of one block. Values are the same where they are one node, for no op changes its operands.
    """
    program = program.copy_blocks()
    ops = [node for node in program.blocks[MODEL].ops if node.target is REPEAT]
    seconds = [node for node in ops if not is_stand_in(node)]
    given = {_list_of(node): arguments(node)[1] for node in seconds}
    for node in ops:
        if arguments(node)[1] != given.get(_list_of(node)):
            raise NotRepeatedError(f"{info(node).module} is not given what the second layer is given")
    for node in seconds:
        replace_node(node, arguments(node)[0])
    return program


def _list_of(node: fx.Node) -> str:
    return info(node).module.rpartition(".")[0]


def stand_in_call(path: str, nodes: Sequence[fx.Node], calls: Sequence[Call]) -> Call:
    """A stand-in as a call of the second layer's block: its own hidden state, the second layer's other values."""
    parent = path.rpartition(".")[0]
    first, second = (next((c for c in calls if c.path == f"{parent}.{i}"), None) for i in (0, 1))
    if first is None or second is None or first.block != second.block or len(nodes) != 1:
        raise NotRepeatedError(f"the first layers of {parent} differ")
    hidden, others = arguments(nodes[0])[:2]
    given = {node.name for node in others}
    inputs = tuple(hidden.name if name in first.outputs else name for name in second.inputs)
    varying = sum(name in first.outputs for name in second.inputs)
    if varying != 1 or len(second.outputs) != 1 or not set(inputs) - {hidden.name} <= given:
        raise NotRepeatedError(f"{path} is not given what {second.path} reads")
    return Call(second.block, path, inputs, (nodes[0].name,))


def complete(program: Program, stand_ins: Sequence[str]) -> Program:
    """The program once the stand-ins at these paths are calls: their parameters, and no value that nobody reads."""
    return drop_unread(_with_repeated_parameters(program, stand_ins)) if stand_ins else program


def _with_repeated_parameters(program: Program, stand_ins: Sequence[str]) -> Program:
    """What decomposition did to the second layer's parameters, done to those of the stand-ins."""
    parameters, fused = dict(program.parameters), dict(program.fused)
    for path in stand_ins:
        parent = path.rpartition(".")[0]
        blocks = {call.block for call in program.layer_calls if call.path.rpartition(".")[0] == parent}
        if len(blocks) != 1:
            raise NotRepeatedError(f"the last layer of {parent} differs from the second")
        second = f"{parent}.1."
        for original, entry in program.fused.items():
            if original.startswith(second):
                own = path + "."
                parts = tuple(own + part.removeprefix(second) for part in entry.parts)
                parameters.pop(own + original.removeprefix(second))
                parameters |= dict(zip(parts, (program.parameters[p] for p in entry.parts), strict=True))
                fused[own + original.removeprefix(second)] = replace(entry, parts=parts)
    return replace(program, parameters=parameters, fused=fused)
