"""Train with your own loop: torchrun --nproc-per-node 2 examples/train_without_trainer.py MODEL TRAIN.jsonl OUT

MODEL is a Hugging Face MoE model (hub id or directory), TRAIN.jsonl has rows {"text": ...}. For two CPU processes:
`make demo` leaves a model in demo/model; any JSONL with a "text" field will do.
"""

import json
import sys

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

import expertmesh as em

name, data, out = sys.argv[1:]
STEPS, ROWS_PER_RANK, LENGTH = 10, 4, 256

mesh = em.init_mesh(em.ParallelConfig(ep=2))  # starts the process group from torchrun's environment
precision = em.PrecisionConfig(params="float32", compute="bfloat16", reduce="float32")
model = em.load_model(name, mesh, precision=precision)  # each rank reads only its own bytes
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
tokenizer = AutoTokenizer.from_pretrained(name)
with open(data, encoding="utf-8") as file:
    texts = [json.loads(line)["text"] for line in file]

for step in range(STEPS):
    first = (step * mesh.layout.data_ranks + mesh.data_rank) * ROWS_PER_RANK  # rows of this data rank
    rows = [tokenizer(texts[(first + row) % len(texts)]).input_ids[:LENGTH] for row in range(ROWS_PER_RANK)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [-1] * (longest - len(row)) for row in rows], device=mesh.device)
    real = ids >= 0
    batch = {"input_ids": ids.clamp(min=0), "labels": ids.masked_fill(~real, -100), "attention_mask": real.long()}
    targets = torch.tensor(em.count_targets(batch["labels"]), device=mesh.device)
    dist.all_reduce(targets)  # targets of the whole step: what makes the sum over ranks the mean
    targets //= dist.get_world_size() // mesh.layout.data_ranks  # ranks along tp, cp and pp have counted the same rows
    loss = em.forward_backward(model, [batch], target_tokens=targets).loss
    grad_norm = em.clip_grad_norm_(model, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
    if mesh.rank == 0:
        print(f"step {step + 1}  loss {loss.item():.4f}  grad norm {grad_norm.item():.3f}")

em.save_model(model, out, tokenizer=tokenizer)  # what transformers' from_pretrained reads
dist.destroy_process_group()
