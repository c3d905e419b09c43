"""What a Hugging Face MoE model is made of: blocks, routed experts, routers. No code per model family."""

from expertmesh.anatomy.structure import (
    HIDDEN_OF_KEYS,
    Anatomy,
    ExpertsSpec,
    carries_state,
    decoder_blocks,
    dense_linears,
    describe,
    experts_spec,
    experts_specs,
    group_by_kind,
    is_classifier,
    is_inside,
    is_within,
    names_without_blocks,
    packable_linears,
    settings,
)

__all__ = [
    "HIDDEN_OF_KEYS",
    "Anatomy",
    "ExpertsSpec",
    "carries_state",
    "decoder_blocks",
    "dense_linears",
    "describe",
    "experts_spec",
    "experts_specs",
    "group_by_kind",
    "is_classifier",
    "is_inside",
    "is_within",
    "names_without_blocks",
    "packable_linears",
    "settings",
]
