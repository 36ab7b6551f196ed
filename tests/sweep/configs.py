"""One function makes any config of transformers small; its numbers keep the proportions that models check."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

WIDTH, LAYERS, VOCABULARY, POSITIONS, EXPERTS, TOP = 8, 2, 99, 64, 8, 2

# Heads stay, and every width and size of a head is divided by WIDTH, so that width = heads × size stays true.
_WIDTH = re.compile(
    r"(?!num_|chunk_size)\w*(hidden_size|hidden_dim|intermediate_size|intermediate_dim|embed_dim|embedding_size|"
    r"embedding_dim|ffn_dim|head_dim|lru_width|projection_dim|emb_dim|ffn_size|lora_rank|inner_size|head_size|"
    r"pooler_size|d_model|d_embed|d_inner|d_ff|d_kv|d_head|n_embd|n_inner|dff|dim_ff|dim_head|mlp_dim|latent_dim|"
    r"kv_channels|feed_forward_size|rotary_dim|nope_head_dim|feedforward_dim|rope_head_dim|v_head_dim|"
    r"axial_pos_embds_dim|d_latents|out_hidden_size|query_pre_attn_scalar|mamba_headdim)|dim|hidden_sizes"
)
_MOST = {  # names → no number of theirs is larger
    re.compile(
        r"num_hidden_layers|n_layers?|num_layers|num_blocks|(num_)?(encoder|decoder)_(num_hidden_)?layers|"
        r"num_(encoder|decoder)_layers|depth|num_local_layers|depths|num_block_repeats"
    ): LAYERS,
    re.compile(r"(\w+_)?vocab_size|vocab_size_per_layer_input"): VOCABULARY,
    re.compile(r"\w+_token_(id|index)"): VOCABULARY - 1,
    re.compile(r"max_position_embeddings|n_positions|max_target_positions|max_seq_len|n_ctx|seq_length"): POSITIONS,
    re.compile(r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts"): EXPERTS,
    re.compile(r"num_experts_per_tok(en)?|moe_topk|moe_top_k|top_k_experts|n_group|num_expert_group"): TOP,
    re.compile(r"topk_group"): 1,
    re.compile(r"sliding_window"): 8,
    re.compile(r"num_kv_shared_layers"): 0,
    re.compile(r"\w*(dropout|pdrop|layerdrop|drop_path_rate|dropout_prob|dropout_p)(_rate)?"): 0.0,
}  # fmt: skip
_LAYERS = next(iter(_MOST))
# What some configs leave open and their models need.
_OPEN = {"pad_token_id": 0, "num_experts_per_tok": TOP, "n_routed_experts": EXPERTS, "vocab_size": VOCABULARY}
# What configs derive themselves, of the number of layers.
_DERIVED = ("stage_names", "out_features", "out_indices", "per_layer_config")


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """The dict of a config, smaller: a few layers of every kind, narrow, few tokens, ids and experts; no dropout.

    Of models whose depths are lists (ResNet, Swin), the widths stay: their groups and heads divide them.
    """
    layers = {n: _layers(config, n) for name, n in config.items() if _is_layers(name, n)}
    narrower = "depths" not in config and "hidden_sizes" not in config
    made = {n: _value(str(n), v, layers, narrower) for n, v in config.items() if n not in _DERIVED}
    return made | {name: value for name, value in _OPEN.items() if name in made and made[name] is None}


def _is_layers(name: Any, value: Any) -> bool:
    return isinstance(value, int) and bool(_LAYERS.fullmatch(str(name)))


def _layers(config: Mapping[str, Any], layers: int) -> int:
    """Enough for each kind that a list of kinds a layer names."""
    kinds = [len({str(k) for k in v}) for v in config.values() if isinstance(v, list) and len(v) == layers]
    return min(layers, max([LAYERS, *kinds]))


def _value(name: str, value: Any, layers: Mapping[int, int], narrower: bool) -> Any:
    if isinstance(value, Mapping):
        return shrink(value) if name not in ("id2label", "label2id") else value
    if name == "layers_block_type" and not layers:  # the only thing that says how many there are
        return list(dict.fromkeys(value))
    if isinstance(value, list | tuple):
        return [_number(name, v, layers, narrower) for v in _of_each_kind(list(value), layers)]
    return False if name == "use_cache" else _number(name, value, layers, narrower)


def _of_each_kind(values: list[Any], layers: Mapping[int, int]) -> list[Any]:
    """Of a list with an entry a layer as many as there are layers, one of each kind first."""
    if len(values) not in layers:
        return values
    kinds = [k for i, k in enumerate(values) if k not in values[:i]]
    return (kinds + values)[: layers[len(values)]]


def _number(name: str, value: Any, layers: Mapping[int, int], narrower: bool) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return value
    if _is_layers(name, value):
        return layers.get(int(value), min(value, LAYERS))
    most = next((most for pattern, most in _MOST.items() if pattern.fullmatch(name)), None)
    if most is not None:
        return min(value, most)
    wide = narrower and _WIDTH.fullmatch(name) and value > WIDTH
    divided = wide and (value % WIDTH == 0 or "intermediate" in name)
    least = 8 if "intermediate" in name else 1  # grouped products want rows of whole 16 bytes
    return -(-int(value) // WIDTH // least) * least if divided else value
