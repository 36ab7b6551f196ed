"""Hugging Face's T5, tiny: an encoder-decoder that learns to write lines of PyTorch's own source backwards."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

LENGTH = 32


def tiny_t5(seed: int = 0) -> T5ForConditionalGeneration:
    """Two encoder and two decoder layers, d = 64; the weights depend on `seed` alone."""
    config = T5Config(  # type: ignore[call-arg] # the base class takes decoder_start_token_id
        vocab_size=256,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(config)


class Backwards:
    """Pieces of PyTorch's source as bytes, and the same pieces from the end."""

    def __init__(self) -> None:
        text = b"".join(path.read_bytes() for path in sorted(Path(torch.__file__).parent.glob("*.py")))
        self._bytes = torch.frombuffer(bytearray(text[: 1 << 18]), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._bytes) // LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self._bytes[index * LENGTH : (index + 1) * LENGTH].long()
        return {"input_ids": piece, "labels": piece.flip(0)}


def main() -> None:
    from demo import prove  # type: ignore[import-not-found] # beside this script

    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    example = {"input_ids": ids, "labels": ids.clone()}
    prove(tiny_t5(), example, folder=Path("out/t5"), data="t5:Backwards", steps=20, gpus=4, pp=2, tp=2, global_batch=16)


if __name__ == "__main__":
    main()
