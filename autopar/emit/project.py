"""The saved folder: model.py, train.py, runtime/, plan.yaml, weights, launch files and a README."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from ..plan.plan import Plan
from ..trace.initialise import Weights
from .opaque import save_opaque

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
    (folder / "train.py").write_text((package / "emit" / "templates" / "train.py").read_text())
    _copy_runtime(folder / "runtime")
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


def _copy_runtime(target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    with resources.as_file(resources.files("autopar") / "runtime") as source:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


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
