"""Hugging Face's Llama: a tiny one to train here, and Llama-3-8B on the meta device to plan."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(seed: int = 0, vocab_size: int = 256, layers: int = 4) -> LlamaForCausalLM:
    """4 heads over 2 key-value heads, d = 128; the weights depend on `seed` alone."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def llama_3_8b() -> LlamaForCausalLM:
    """Llama-3-8B (8.03 B parameters) on the meta device: sizes of Meta's published configuration."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def main() -> None:
    """Train the tiny one under a budget on four CPU processes, prove it, and plan Llama-3-8B for 64 H100s."""
    from demo import run  # type: ignore[import-not-found] # beside this script

    import autopar

    run(tiny_llama(), None, budget="24MiB", folder=Path("out/llama"), steps=100, global_batch=16, sequence=128)
    result = autopar.parallelize(llama_3_8b(), gpus=64, gpu="h100-sxm-80gb")
    print(f"\n{result}\n\n{result.explain()}")
    print(f"\nwrote {result.save('out/llama-64', overwrite=True)}/")


if __name__ == "__main__":
    main()
