"""Trains the model of model.py by its plan; README.md says how to launch it.

torchrun --nproc-per-node <processes> -- train.py --steps 100 --log train.jsonl
(The `--` keeps torchrun from taking `--log` for one of its own options.)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch.distributed import destroy_process_group
from torch.distributed.elastic.multiprocessing.errors import record

import model
from runtime.data import Loader, load_dataset
from runtime.metrics import Meter
from runtime.precision import LossScale
from runtime.trainer import Trainer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=100, help="optimizer steps of this run")
    add("--lr", type=float, help="learning rate, constant (default: the plan's)")
    add("--seed", type=int, help="of initialisation, dropout and the order of the data (default: 0, or as saved)")
    add("--clip", type=float, help="largest total gradient norm (default: no clipping)")
    add("--loss-scale", type=float, default=65536.0, help="of fp16, at first (default: 65536)")
    add(
        "--growth-interval",
        type=int,
        default=2000,
        metavar="STEPS",
        help="clean steps until the loss scale doubles (default: 2000)",
    )
    add("--data", metavar="MODULE:FUNCTION", help="gives a map-style dataset of dicts (default: Python's source)")
    add("--no-shuffle", action="store_true", help="train on the samples in their order")
    add("--log", type=Path, metavar="FILE", help="append a JSON line a step")
    add(
        "--init",
        type=Path,
        metavar="DIR",
        help="start from weights.pt in DIR (default: this folder), or go on from the latest checkpoint of a --save",
    )
    add("--save", type=Path, metavar="DIR", help="write a checkpoint, DIR/step-N, at the end and on SIGTERM")
    add("--save-every", type=int, metavar="N", help="and after every N steps")
    add("--keep", type=int, metavar="K", help="keep the latest K checkpoints (default: all)")
    add("--measure-memory", action="store_true", help="on a CPU, count live storage (slow)")
    args = parser.parse_args()
    counts = [n for n in (args.save_every, args.keep) if n is not None]
    if counts and (args.save is None or min(counts) < 1):
        parser.error("--save-every and --keep go with --save, and are 1 or more")
    return args


@record  # torchrun then shows the traceback of the rank that failed first
def main() -> None:
    args = parse_arguments()
    meter = Meter(args.log, args.measure_memory)
    with meter.counting:
        scale = LossScale(args.loss_scale, args.growth_interval)
        trainer = Trainer(model, args.init, seed=args.seed, lr=args.lr, clip=args.clip, loss_scale=scale)
        dataset = load_dataset(args.data, model.SETTINGS)
        loader = Loader(dataset, trainer.mesh, shuffle=not args.no_shuffle, seed=trainer.seed)
        if args.save:
            trainer.prepare_saves(args.save)
        steps = range(trainer.steps, trainer.steps + args.steps)
        for step in steps:
            meter.start()
            batch = loader.batch(trainer.samples)
            meter.loaded()
            result = trainer.step(batch)
            meter.stop(step, result, trainer.mesh, steps)
            if args.save_every and trainer.steps % args.save_every == 0:
                trainer.save(args.save, args.keep)
            if result.stop:
                break
    if args.save:
        trainer.save(args.save, args.keep)
    destroy_process_group()


if __name__ == "__main__":
    main()
