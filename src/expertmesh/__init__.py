"""Train Hugging Face Mixture-of-Experts models with expert parallelism on PyTorch FSDP2.

The public names load what they need on first use, so that `import expertmesh` costs nothing and configuration
errors are found before torch is imported. Everything not listed here is private.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "MoeConfig": "expertmesh.config",
    "ParallelConfig": "expertmesh.config",
    "PrecisionConfig": "expertmesh.config",
    "causal_lm_loss": "expertmesh.training.loss",
    "clip_grad_norm_": "expertmesh.parallel.gradients",
    "count_targets": "expertmesh.training.loss",
    "init_mesh": "expertmesh.mesh",
    "load_model": "expertmesh.model",
    "parallelize": "expertmesh.model",
    "save_model": "expertmesh.weights.save",
}

__all__ = [
    "MoeConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "__version__",
    "causal_lm_loss",
    "clip_grad_norm_",
    "count_targets",
    "init_mesh",
    "load_model",
    "parallelize",
    "save_model",
]

if TYPE_CHECKING:
    from expertmesh.config import MoeConfig, ParallelConfig, PrecisionConfig
    from expertmesh.mesh import init_mesh
    from expertmesh.model import load_model, parallelize
    from expertmesh.parallel.gradients import clip_grad_norm_
    from expertmesh.training.loss import causal_lm_loss, count_targets
    from expertmesh.weights.save import save_model


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'expertmesh' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
