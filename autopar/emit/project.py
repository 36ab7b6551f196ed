"""The saved folder: model.py, train.py, runtime/, plan.yaml, weights, launch files and a README; edits are not lost."""

from __future__ import annotations

import ast
import io
import json
import pickle
import shlex
import shutil
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..plan.plan import Plan
from ..runtime.opaque import FILE, Applied, OpaqueModule
from ..trace.initialise import Weights

KEPT = ".original"  # the folder, inside a saved program, with its files as they were written
KEPT_RUNTIME = "runtime.zip"  # in that folder, the runtime: Python can import from it
# Text that a saved program consists of, and that people edit.
WRITTEN = ("model.py", "train.py", "plan.yaml", "README.md", "launch.sh", "job.sbatch", "init.json")
_IMPORTABLE = "define it at the top of a module that the program can import"

_README = """# {title}

{summary}

## Run

One node ({processes} processes):

    torchrun --nproc-per-node {processes} -- train.py --steps 100 --log train.jsonl

{many_nodes}`train.py --help` lists the options: learning rate, clipping, data, initial weights, checkpoints.
`--save DIR` writes checkpoints, DIR/step-N, each whole or not at all: at the end, on SIGTERM, every `--save-every`
steps; `--init DIR` goes on from the latest whole one, under this plan or another.
The folder needs nothing but PyTorch{needs}. Floating inputs of a batch (images, say) are cast to the plan's precision.

## Files

- `model.py`: the distributed model, one class per distinct layer, under the original parameter names
- `train.py`: the training loop
- `plan.yaml`: the plan; edit it and emit again with `autopar emit --plan plan.yaml`
- `runtime/`: collectives, data parallelism, pipeline, optimizer, checkpoints
{weights}"""

_MANY_NODES = """{nodes} nodes of {per_node}, on each:

    torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29500 -- train.py

or `sbatch job.sbatch` under Slurm.

"""

_LAUNCH = """#!/usr/bin/env bash
# Trains on one node, or on each of several: NODES=8 HOST=first-node ./launch.sh --steps 1000
set -euo pipefail
cd "$(dirname "$0")"
exec torchrun --nnodes "${{NODES:-{nodes}}}" --nproc-per-node {per_node} \\
  --rdzv-backend c10d --rdzv-endpoint "${{HOST:-localhost}}:${{PORT:-29500}}" -- train.py "$@"
"""

_SBATCH = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive
export HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun ./launch.sh --steps 1000 --log train.jsonl
"""


def save_project(
    folder: Path,
    source: str,
    plan: Plan,
    weights: Weights,
    *,
    name: str,
    summary: str,
    gpus_per_node: int,
    opaque: bytes,
) -> None:
    """Write the program of `source` (the text of model.py) into `folder`, made if missing.

    name: an identifier. summary: the plan table and what was predicted, as markdown. Values go to weights.pt,
    recorded initialisations to init.json, modules that are kept whole (`opaque`, packed) to opaque.pt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(source)
    package = resources.files("autopar")
    train = (package / "emit" / "templates" / "train.py").read_text()
    (folder / "train.py").write_text(train)
    _copy_runtime(folder / "runtime", reached_modules(source, train))
    plan.save(folder / "plan.yaml")
    _save_weights(folder, weights)
    save_opaque(folder, opaque)
    world = plan.mesh.world_size
    per_node = min(world, gpus_per_node)
    nodes = -(-world // per_node)
    sizes = {"nodes": nodes, "per_node": per_node, "name": shlex.quote(name), "processes": world}
    many = _MANY_NODES.format(**sizes) if nodes > 1 else ""
    notes = "- `weights.pt`: initial values\n" if weights.values else ""
    notes += "- `init.json`: the recorded initialisation, drawn with a seed per parameter\n" if weights.recipes else ""
    needs = ", and the classes of the modules in opaque.pt on PYTHONPATH" if opaque else ""
    notes += "- `opaque.pt`: modules of the original that are kept whole\n" if opaque else ""
    readme = _README.format(title=name, needs=needs, summary=summary, many_nodes=many, weights=notes, processes=world)
    (folder / "README.md").write_text(readme)
    (folder / "launch.sh").write_text(_LAUNCH.format(**sizes))
    (folder / "launch.sh").chmod(0o755)
    (folder / "job.sbatch").write_text(_SBATCH.format(**sizes))


def _copy_runtime(target: Path, modules: Collection[str]) -> None:
    """Make a folder of these modules alone: what an earlier program has left in it goes."""
    if target.exists():
        shutil.rmtree(target)
    target.mkdir()
    for name in ("__init__", *modules):
        (target / f"{name}.py").write_text(_runtime_source(name))


def reached_modules(*texts: str) -> list[str]:
    """The modules of the runtime that Python files import, given as text, directly or through each other."""
    reached: set[str] = set()
    unread = list(texts)
    while unread:
        new = _imported_modules(unread.pop()) - reached
        reached |= new
        unread += map(_runtime_source, new)
    return sorted(reached)


def _imported_modules(text: str) -> set[str]:
    """Modules of the runtime by name: `runtime.mesh` as a program imports it, `.mesh` as the runtime itself does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.level or f"{node.module}.".startswith("runtime.")):
            module = (node.module or "").removeprefix("runtime").lstrip(".")
            names |= {module} if module else {alias.name for alias in node.names}
    return names


def _runtime_source(name: str) -> str:
    return (resources.files("autopar") / "runtime" / f"{name}.py").read_text()


def _save_weights(folder: Path, weights: Weights) -> None:
    for stale in ("weights.pt", "init.json"):
        (folder / stale).unlink(missing_ok=True)
    if weights.values:
        save_tensors(folder / "weights.pt", weights.values)
    if weights.recipes:
        (folder / "init.json").write_text(json.dumps(dict(weights.recipes), indent=0))


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors by name; those that share storage are stored once."""
    torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, path)


# --------------------------------------------------------------------------------
# Modules that are kept whole


def pack_opaque(modules: Mapping[str, OpaqueModule]) -> bytes:
    """The file that holds the modules; nothing without any. PlanError where another process cannot import a class."""
    if not modules:
        return b""
    for name, opaque in modules.items():
        for kind in _classes(opaque.module):
            if kind.__module__ == "__main__":
                raise PlanError(f"{name} is kept whole, and its class {kind.__name__} is in a script: {_IMPORTABLE}")
    packed = io.BytesIO()
    try:
        torch.save({name: (_kept(opaque.module), opaque.inputs) for name, opaque in modules.items()}, packed)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(f"{', '.join(modules)}, kept whole, cannot be saved ({error}): {_IMPORTABLE}") from error
    return packed.getvalue()


def save_opaque(folder: Path, packed: bytes) -> None:
    """Write the file of the modules beside the program, or remove what is left of an earlier one."""
    (folder / FILE).unlink(missing_ok=True)
    if packed:
        (folder / FILE).write_bytes(packed)


def _kept(module: nn.Module) -> Any:
    """The module as it is pickled: a Function as its class, for `Applied` is another class in the saved runtime."""
    return module.function if isinstance(module, Applied) else module


def _classes(module: nn.Module) -> list[type]:
    return [module.function] if isinstance(module, Applied) else [type(part) for part in module.modules()]


# --------------------------------------------------------------------------------
# What somebody has edited in a folder that is about to be written


def check_folder(folder: Path, overwrite: bool | Collection[str] = False) -> None:
    """PlanError where a program cannot be written to `folder`, or files edited by hand would be lost.

    overwrite: True for whatever is there, or the names of files that may be overwritten.
    """
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            where = "" if part == folder else f"{folder}: "
            raise PlanError(f"{where}{part} is a file, and a program is a folder: name another")
    allowed = edited_files(folder) if overwrite is True else overwrite or ()
    if lost := [name for name in edited_files(folder) if name not in allowed]:
        shown = ", ".join(lost[:6]) + (f" and {len(lost) - 6} more" if len(lost) > 6 else "")
        raise PlanError(
            f"{folder} has files that were not written by autopar, or edited since: {shown}. Write to another folder, "
            "or overwrite them with --force (in Python: overwrite=True)"
        )


def edited_files(folder: Path) -> list[str]:
    """Files that writing a program to `folder` would change or remove, and that are not as autopar wrote them."""
    runtime = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("runtime/**/*")) if path.is_file()]
    names = [*WRITTEN, *(name for name in runtime if "__pycache__" not in name)]
    try:
        written = files_as_written(folder)
    except PlanError:
        written = {}
    return [name for name in names if (path := folder / name).exists() and path.read_bytes() != written.get(name)]


def files_as_written(folder: Path) -> dict[str, bytes]:
    """The files of a saved program as autopar wrote them, by name. PlanError where they are damaged."""
    kept = folder / KEPT
    try:
        files = {path.relative_to(kept).as_posix(): path.read_bytes() for path in kept.rglob("*") if path.is_file()}
        if (archive := files.pop(KEPT_RUNTIME, None)) is not None:
            with ZipFile(io.BytesIO(archive)) as runtime:
                files |= {name: runtime.read(name) for name in runtime.namelist() if not name.endswith("/")}
    except Exception as error:  # a damaged archive raises errors of zipfile, zlib, struct and others
        raise PlanError(f"{kept} is damaged ({error}): save the program again") from error
    return files
