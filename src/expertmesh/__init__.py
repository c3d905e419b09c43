"""Train Hugging Face Mixture-of-Experts models with expert parallelism on PyTorch FSDP2.

The public names load what they need on first use, so that `import expertmesh` costs nothing and configuration
errors are found before torch is imported. Everything not listed here is private.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LoraConfig": "expertmesh.config",
    "MoeConfig": "expertmesh.config",
    "ParallelConfig": "expertmesh.config",
    "PrecisionConfig": "expertmesh.config",
    "accumulate_by_layer": "expertmesh.step.forward_backward",
    "adapters_off": "expertmesh.adapters.plan",
    "causal_lm_loss": "expertmesh.step.loss",
    "clip_grad_norm_": "expertmesh.step.grad_norm",
    "count_targets": "expertmesh.step.loss",
    "forward_backward": "expertmesh.step.forward_backward",
    "init_mesh": "expertmesh.distributed.mesh",
    "iter_hf_weights": "expertmesh.adapters.save",
    "like_ddp": "expertmesh.state.other_code",
    "load_checkpoint": "expertmesh.checkpoint.interface",
    "load_model": "expertmesh.model",
    "load_weights": "expertmesh.checkpoint.interface",
    "lora_from_peft": "expertmesh.adapters.peft_config",
    "parallelize": "expertmesh.model",
    "record_routes": "expertmesh.parallel.routes",
    "router_losses": "expertmesh.step.router_losses",
    "save_adapter": "expertmesh.adapters.save",
    "save_checkpoint": "expertmesh.checkpoint.interface",
    "save_model": "expertmesh.weights.save",
    "trainer": "expertmesh.integrations.trainer",
    "update_router_bias": "expertmesh.experts.balance",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from expertmesh.adapters.peft_config import lora_from_peft as lora_from_peft
    from expertmesh.adapters.plan import adapters_off as adapters_off
    from expertmesh.adapters.save import iter_hf_weights as iter_hf_weights
    from expertmesh.adapters.save import save_adapter as save_adapter
    from expertmesh.checkpoint.interface import load_checkpoint as load_checkpoint
    from expertmesh.checkpoint.interface import load_weights as load_weights
    from expertmesh.checkpoint.interface import save_checkpoint as save_checkpoint
    from expertmesh.config import LoraConfig as LoraConfig
    from expertmesh.config import MoeConfig as MoeConfig
    from expertmesh.config import ParallelConfig as ParallelConfig
    from expertmesh.config import PrecisionConfig as PrecisionConfig
    from expertmesh.distributed.mesh import init_mesh as init_mesh
    from expertmesh.experts.balance import update_router_bias as update_router_bias
    from expertmesh.integrations.trainer import trainer as trainer
    from expertmesh.model import load_model as load_model
    from expertmesh.model import parallelize as parallelize
    from expertmesh.parallel.routes import record_routes as record_routes
    from expertmesh.state.other_code import like_ddp as like_ddp
    from expertmesh.step.forward_backward import accumulate_by_layer as accumulate_by_layer
    from expertmesh.step.forward_backward import forward_backward as forward_backward
    from expertmesh.step.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from expertmesh.step.loss import causal_lm_loss as causal_lm_loss
    from expertmesh.step.loss import count_targets as count_targets
    from expertmesh.step.router_losses import router_losses as router_losses
    from expertmesh.weights.save import save_model as save_model


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'expertmesh' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
