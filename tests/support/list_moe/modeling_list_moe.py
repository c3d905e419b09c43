"""A model whose experts are an `nn.ModuleList` of MLPs, as models that bring their own code have them.

For the tests of fused lists. `config.style` is how the block loops: "deepseek" as in DeepSeek-V2's own code, "qwen" as
in transformers 4's Qwen-MoE and Mixtral, others as no list can be fused for. `config.expert` is what one expert is.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_list_moe import ListMoeConfig


class GatedMLP(nn.Module):
    def __init__(self, config, bias=False):
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class BiasedMLP(GatedMLP):
    """Names in another order, biases, and a clamp between."""

    def __init__(self, config):
        super().__init__(config, bias=True)

    def forward(self, x):
        gate = F.gelu(self.up_proj(x)).clamp(max=0.4)
        return self.down_proj(self.gate_proj(x) * gate)


class PlainMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wi = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.wo = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.wo(F.relu(self.wi(x)) ** 2)


class ResidualMLP(GatedMLP):
    """Not an MLP alone: adds its input."""

    def forward(self, x):
        return x + super().forward(x)


EXPERTS = {"gated": GatedMLP, "biased": BiasedMLP, "plain": PlainMLP, "residual": ResidualMLP}


class AddAuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype = loss.dtype
        ctx.required_aux_loss = loss.requires_grad
        return x

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, torch.ones(1, dtype=ctx.dtype, device=grad_output.device).squeeze()


class Gate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.alpha = config.aux_loss_alpha
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=0.2)

    def forward(self, hidden):
        hidden = hidden.view(-1, hidden.shape[-1])
        scores = F.linear(hidden.float(), self.weight.float()).softmax(dim=-1)
        if hidden.dtype == torch.float64:
            scores = F.linear(hidden, self.weight).softmax(dim=-1)
        weight, index = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        aux = (scores.mean(0) ** 2).sum() * self.alpha if self.training and self.alpha else None
        return index, weight, aux


class DeepseekBlock(nn.Module):
    """Repeats tokens and loops in training, sorts them and loops over the hit ones in evaluation."""

    def __init__(self, config):
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.experts = nn.ModuleList([EXPERTS[config.expert](config) for _ in range(config.n_routed_experts)])
        self.gate = Gate(config)
        self.shared_experts = GatedMLP(config)

    def forward(self, hidden_states):
        identity = hidden_states
        orig_shape = hidden_states.shape
        topk_idx, topk_weight, aux_loss = self.gate(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        flat_topk_idx = topk_idx.view(-1)
        if self.training:
            hidden_states = hidden_states.repeat_interleave(self.num_experts_per_tok, dim=0)
            y = torch.empty_like(hidden_states)
            for i, expert in enumerate(self.experts):
                y[flat_topk_idx == i] = expert(hidden_states[flat_topk_idx == i])
            y = (y.view(*topk_weight.shape, -1) * topk_weight.unsqueeze(-1)).sum(dim=1)
            y = y.to(hidden_states.dtype).view(*orig_shape)
            if aux_loss is not None:
                y = AddAuxiliaryLoss.apply(y, aux_loss)
        else:
            y = self.moe_infer(hidden_states, flat_topk_idx, topk_weight.view(-1, 1)).view(*orig_shape)
        return y + self.shared_experts(identity)

    @torch.no_grad()
    def moe_infer(self, x, flat_expert_indices, flat_expert_weights):
        out = torch.zeros_like(x)
        order = flat_expert_indices.argsort()
        ends = flat_expert_indices.bincount().cpu().numpy().cumsum(0)
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            token = order[start:end] // self.num_experts_per_tok
            rows = self.experts[i](x[token])
            out.index_add_(0, token, (rows * flat_expert_weights[order[start:end]]).to(x.dtype))
        return out


class QwenBlock(nn.Module):
    """Routes by itself; loops over all experts; returns the router's logits beside its output."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, self.top_k = config.n_routed_experts, config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.experts = nn.ModuleList([EXPERTS[config.expert](config) for _ in range(self.num_experts)])

    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        router_logits = self.gate(hidden_states)
        routing_weights, selected = torch.topk(F.softmax(router_logits, dim=1), self.top_k, dim=-1)
        routing_weights = (routing_weights / routing_weights.sum(dim=-1, keepdim=True)).to(hidden_states.dtype)
        final = torch.zeros_like(hidden_states)
        mask = F.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        for index in range(self.num_experts):
            expert = self.experts[index]
            place, token = torch.where(mask[index])
            current = hidden_states[None, token].reshape(-1, shape[-1])
            final.index_add_(0, token, expert(current) * routing_weights[token, place, None])
        return final.reshape(shape), router_logits


class ChainBlock(QwenBlock):
    """What an expert is given depends on what the one before it answered."""

    def forward(self, hidden_states):
        hidden_states, logits = super().forward(hidden_states)
        return self.experts[0](hidden_states), logits


class ReadingBlock(QwenBlock):
    """Looks into its experts beside calling them."""

    def forward(self, hidden_states):
        return super().forward(hidden_states.to(self.experts[0].down_proj.weight.dtype))


class CountingBlock(QwenBlock):
    """Counts its calls in a buffer."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, hidden_states):
        self.calls += 1
        return super().forward(hidden_states)


BLOCKS = {
    "deepseek": DeepseekBlock,
    "qwen": QwenBlock,
    "chain": ChainBlock,
    "reading": ReadingBlock,
    "counting": CountingBlock,
}


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class ListMoeLayer(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(config.hidden_size), nn.RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp = BLOCKS[config.style](config)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        out = self.mlp(self.norm_2(x))
        return x + (out[0] if isinstance(out, tuple) else out)


class ListMoePreTrainedModel(PreTrainedModel):
    config_class = ListMoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ListMoeLayer"]  # noqa: RUF012

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=0.2)


class ListMoeModel(ListMoePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([ListMoeLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class ListMoeForCausalLM(ListMoePreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = ListMoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, use_cache=None, return_dict=None):
        outputs = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds)
        return CausalLMOutputWithPast(logits=self.lm_head(outputs[0]))
