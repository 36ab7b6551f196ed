"""Mixtures of experts: the runtime's function, and the op of the trace, against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.custom import ACTIVATIONS, EXPERTS
from autopar.runtime.experts import experts
from autopar.trace.moe import _activation, one_op_experts

E, D, WIDTH, TOKENS, K = 5, 8, 12, 9, 2
Results = list[Tensor]


def mixtral_experts(act: str = "silu") -> Any:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=D, intermediate_size=WIDTH, num_local_experts=E, hidden_act=act)
    config._experts_implementation = "eager"
    module = MixtralExperts(config).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module


def tokens(chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the experts of each (none of those from `chosen` on), what each counts."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, D, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.rand(TOKENS, K, dtype=torch.float64, generator=generator, requires_grad=True)
    index = torch.stack([torch.randperm(chosen, generator=generator)[:K] for _ in range(TOKENS)])
    return x, index, weights


def with_gradients(result: Tensor, leaves: Results) -> Results:
    gradient = torch.randn(result.shape, dtype=result.dtype, generator=torch.Generator().manual_seed(2))
    return [result, *torch.autograd.grad(result, leaves, gradient)]


@pytest.mark.parametrize("chosen", [E, 2], ids=["all experts", "three without tokens"])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_values_and_all_gradients_are_transformers_own(act: str, chosen: int) -> None:
    module, (x, index, weights) = mixtral_experts(act), tokens(chosen)
    leaves = [x, weights, *module.parameters()]
    expected = with_gradients(module(x, index, weights), leaves)
    name = _activation(module)
    assert name is not None
    gate, up = module.gate_up_proj.chunk(2, dim=1)
    for result in (
        experts(x, index, weights, gate, up, module.down_proj, ACTIVATIONS[name][1]),
        EXPERTS(x, index, weights, gate, up, module.down_proj, name),
    ):
        for actual, right in zip(with_gradients(result, leaves), expected, strict=True):
            torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)


def test_bf16_sums_in_the_precision_of_the_weights_of_the_router() -> None:
    module, (x, index, weights) = mixtral_experts(), tokens(E)
    exact = module(x, index, weights)
    gate, up, down = (p.bfloat16() for p in (*module.gate_up_proj.chunk(2, dim=1), module.down_proj))
    result = experts(x.bfloat16(), index, weights.float(), gate, up, down, F.silu)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), exact, rtol=0.05, atol=0.05 * float(exact.detach().abs().max()))


def test_without_tokens_there_is_nothing() -> None:
    module = mixtral_experts()
    gate, up = module.gate_up_proj.chunk(2, dim=1)
    x, index, weights = tokens(E)
    result = experts(x[:0], index[:0], weights[:0], gate, up, module.down_proj, F.silu)
    assert result.shape == (0, D)


# --------------------------------------------------------------------------------
# Which modules are one op


def test_experts_of_another_form_stay_as_they_are_written() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    assert _activation(mixtral_experts("quick_gelu")) is None
    biased = GptOssExperts(GptOssConfig(hidden_size=D, intermediate_size=WIDTH, num_local_experts=E))
    assert _activation(biased) is None


def test_the_users_choice_of_implementation_is_put_back() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=D, intermediate_size=WIDTH, num_local_experts=E, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=11,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    with one_op_experts(model):
        assert model.config._experts_implementation == "autopar"
    assert model.config._experts_implementation == "batched_mm"
