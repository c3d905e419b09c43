"""A configuration that comes with a model's own code; see modeling_list_moe.py."""

from transformers import PretrainedConfig


class ListMoeConfig(PretrainedConfig):
    model_type = "list_moe"

    def __init__(
        self,
        vocab_size=96,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        style="deepseek",
        aux_loss_alpha=0.0,
        expert="gated",
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.moe_intermediate_size = moe_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.n_routed_experts = n_routed_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.style = style
        self.aux_loss_alpha = aux_loss_alpha
        self.expert = expert
        super().__init__(**kwargs)
