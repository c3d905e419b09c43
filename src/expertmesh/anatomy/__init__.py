"""What a Hugging Face MoE model is made of: blocks, routed experts, routers. No code per model family."""

from expertmesh.anatomy.structure import (
    Anatomy,
    ExpertsSpec,
    alike_as_one,
    decoder_blocks,
    describe,
    experts_spec,
    is_adapter,
    is_classifier,
    is_inside,
)

__all__ = [
    "Anatomy",
    "ExpertsSpec",
    "alike_as_one",
    "decoder_blocks",
    "describe",
    "experts_spec",
    "is_adapter",
    "is_classifier",
    "is_inside",
]
