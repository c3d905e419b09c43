"""Plant one bug after the other in a copy of the source, and see that the test that promises its absence is red.

    python -m tests.planted [WORD ...]    # bugs whose name has one of the words; all in about a quarter of an hour

A row of `TABLE` is a bug's name, its file in src/expertmesh with a text that stands there once and what is planted in
its place, and a test of `make test`. A text that is no longer there is an error; the exit code is 1 if a bug is not
seen. tests/test_planted.py holds the table to the source.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/expertmesh")

TABLE = """
gradients twice as large
    parallel/apply.py: unit.set_gradient_divide_factor(1.0) -> unit.set_gradient_divide_factor(0.5)
    parallel/test_parity.py::test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model
gradients of replicas reduced behind the first micro-batch alone
    step/forward_backward.py: model.set_requires_all_reduce(index == len(micro_batches))
    -> model.set_requires_all_reduce(index == 1)
    parallel/test_parity.py::test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model
norm of this rank's shards alone
    step/grad_norm.py: dist.all_reduce(total, dist.ReduceOp.SUM, group=group) -> pass
    parallel/test_gradients.py::test_the_norm_equals_the_unsharded_one_and_clipping_reaches_the_limit
norm counts a tied weight on both stages
    step/grad_norm.py: p.grad is not None and not is_tied_replica(p) -> p.grad is not None
    parallel/test_pipeline.py::test_every_layout_equals_the_unsharded_model
result of a token's second expert overwrites that of the first
    experts/expert_mlp.py: out_RH.index_add_(0, pairs.row_P[span], out_pH.to(out_RH.dtype))
    -> out_RH.index_copy_(0, pairs.row_P[span], out_pH.to(out_RH.dtype))
    parallel/test_parity.py::test_one_expert_after_the_other_gives_the_same_result
routing weights applied twice
    experts/expert_mlp.py: return segment_sum(out_PH, pairs.by_row, mlp.triton)
    -> return segment_sum(out_PH * weight_P.unsqueeze(1), pairs.by_row, mlp.triton)
    experts/test_compute.py::test_output_and_every_gradient_equal_the_plain_experts
ends of experts off by one among the rows received
    experts/dispatch.py: expert_end_L=received[:, 1:].sum(0) -> expert_end_L=received[:, 1:].roll(1, 1).sum(0)
    experts/test_dispatch.py::test_results_and_gradients_equal_a_single_process
gradients of routing weights returned in the order of experts
    experts/dispatch.py: exact(torch.empty_like(grad_weight_P).index_copy_(0, received_P, grad_weight_P))
    -> exact(grad_weight_P)
    experts/test_dispatch.py::test_results_and_gradients_equal_a_single_process
rows between nodes sent for another node's experts
    experts/dispatch.py: index_TK.index_select(0, token_Q) - node_Q1 * here
    -> index_TK.index_select(0, token_Q) - node_Q1.flip(0) * here
    experts/test_dispatch.py::test_results_and_gradients_equal_a_single_process
placement read the wrong way round
    experts/install.py: device=device), torch.tensor(inverse(order), device=device), None
    -> device=device), torch.tensor(order, device=device), None
    parallel/test_placement.py::test_experts_on_any_rank_equal_the_unsharded_model
gradients of copies lost
    experts/layer.py: summed = (segment_sum(part, copies.by_owner) -> summed = (segment_sum(0 * part, copies.by_owner)
    parallel/test_placement.py::test_adapters_of_copied_experts_equal_stock_peft
auxiliary loss of each micro-batch by itself
    step/router_losses.py: if self._step is None: -> if True:
    parallel/test_router_loss.py::test_values_and_every_gradient_equal_the_unsharded_models_own_losses
auxiliary loss counts padding
    experts/balance.py: return count_pairs(index_TK, logits_TE.shape[-1], real_T)
    -> return count_pairs(index_TK, logits_TE.shape[-1], None)
    parallel/test_router_loss.py::test_packed_rows_leave_their_padding_out
router biases move away from balance
    experts/balance.py: balance.num_experts * count_LE).sign() -> balance.num_experts * count_LE).sign().neg()
    experts/test_balance.py::test_four_steps_move_the_bias_as_the_rule_does_and_alike_on_every_rank
gradient of an expert's adapter without its scaling
    experts/expert_mlp.py: low_up_Pr, end_L).mul_(up_scaling) -> low_up_Pr, end_L)
    adapters/test_parity.py::test_every_adapter_gradient_and_two_steps_equal_stock_peft
dropout of adapters equal for all experts of a token
    experts/expert_mlp.py: mixed(number_P) + expert_L[pairs.expert_P()] -> mixed(number_P)
    experts/test_lora.py::test_each_expert_of_a_token_drops_for_itself_wherever_it_is
mask of dropout sent to another token's row
    experts/layer.py: replace(dropout, token_numbers=numbers_R) -> replace(dropout, token_numbers=numbers_R.roll(1))
    adapters/test_dropout.py::test_every_layout_and_batch_drops_the_same
tied weights drift apart between stages
    step/forward_backward.py: local.add_(received) -> local.add_(0 * received)
    parallel/test_pipeline.py::test_every_layout_equals_the_unsharded_model
stage skips its first block
    parallel/pipeline.py: active = pipeline.stages[stage] -> active = pipeline.stages[stage][1:]
    parallel/test_pipeline.py::test_two_stages_equal_the_unsharded_model
loss of a stage's routers counted twice
    step/pipeline_schedule.py: return gradient, gradient.new_ones( -> return gradient, 2 * gradient.new_ones(
    parallel/test_pipeline_balance.py::test_router_losses_equal_the_unsharded_models_on_the_global_batch
gradient of another micro-batch by layer
    step/by_layer.py: following = self._forwards[layer + 1][number] -> following = self._forwards[layer + 1][-1]
    parallel/test_by_layer.py::test_every_layout_equals_the_unsharded_model
input of another micro-batch for the last layer of a Trainer
    step/by_layer.py: self._run_last(self._last, number, forward.received)
    -> self._run_last(self._last, number, forward.received.roll(1, 1).detach().requires_grad_())
    integrations/test_by_layer.py::test_in_double_precision_every_gradient_and_weight_is_the_stock_trainers
gradients of a Trainer's layer reduced at each micro-batch
    step/by_layer.py: if number == len(forwards) - 1 and layer >= first: -> if number == 0 and layer >= first:
    integrations/test_by_layer.py::test_gathers_and_reductions_of_a_step_do_not_grow_with_its_micro_batches
losses of a Trainer's step counted twice
    integrations/trainer.py: batches, run, **self.order)).sum() -> batches, run, **self.order)).sum() * 2
    integrations/test_by_layer.py::test_in_double_precision_every_gradient_and_weight_is_the_stock_trainers
gradients of router logits lost on the way to their layers
    step/by_layer.py: leaf.grad).sum() for -> 0 * leaf.grad).sum() for
    integrations/test_by_layer.py::test_sft_equals_the_stock_trainer
input kept on the host is stale
    step/by_layer.py: self._run(lambda: self._bytes().copy_(self._copy
    -> self._run(lambda: self._bytes().copy_(0 * self._copy
    parallel/test_by_layer.py::test_every_layout_equals_the_unsharded_model
part of the positions off under cp and tp together
    parallel/sequence.py: self.cp_rank * self.tp + self.tp_rank) -> self.tp_rank * self.cp + self.cp_rank)
    parallel/test_axes.py::test_axes_together_equal_one_process
labels cut before they are shifted
    step/loss.py: return cut(F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED), 1)
    -> return F.pad(cut(labels_BS, 1)[:, 1:], (0, 1), value=IGNORED)
    parallel/test_context.py::test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model
heads of cp ranks interleaved
    parallel/context.py: return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
    -> return received.permute(1, 2, 3, 0, 4).flatten(2, 3)
    parallel/test_context.py::test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model
bias behind a split layer added by each rank
    parallel/tensor.py: placed.enter_context(_biased(last, None)) -> pass
    parallel/test_tensor.py::test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model
tp takes the logits of other words
    step/vocabulary.py: chosen_C = torch.where(here_C, shifted_CW -> chosen_C = torch.where(~here_C, shifted_CW
    parallel/test_tensor.py::test_every_gradient_and_the_weights_after_two_steps_equal_the_unsharded_model
packed samples see each other
    data/loader.py: position_ids[b, start:end] = np.arange(end - start)
    -> position_ids[b, start:end] = np.arange(start, end)
    data/test_packed_model.py::test_packed_documents_have_the_logits_of_separate_rows
window one position too long in packed rows
    parallel/packing.py: sliding_window - 1, 0) -> sliding_window, 0)
    parallel/test_varlen.py::test_packed_rows_have_the_gradients_of_a_dense_mask
second moment corrected as the first
    training/optimizers/adamw.py: (1 - beta2**step) -> (1 - beta1**step)
    training/test_optimizers.py::test_muon_is_torch_s_muon_on_each_matrix_by_itself
step count not restored
    checkpoint/state.py: optimizer.state[parameter][slot] = slots[key]
    -> optimizer.state[parameter][slot] = slots[key] if slot != "step" else torch.zeros(())
    checkpoint/test_layouts.py::test_every_layout_reads_the_same_state_and_goes_on_alike
moments exchanged when they are restored
    checkpoint/state.py: optimizer.state[parameter][slot] = slots[key]
    -> optimizer.state[parameter][{"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}.get(slot, slot)] = slots[key]
    checkpoint/test_layouts.py::test_every_layout_reads_the_same_state_and_goes_on_alike
part of a checkpoint read from another place
    checkpoint/read.py: read_box(lazy, place, out[slices(wanted, box)], self.files.read)
    -> read_box(lazy, place, out[slices(wanted, box)].flip(0), self.files.read)
    checkpoint/test_layouts.py::test_every_layout_reads_the_same_state_and_goes_on_alike
all experts start with the first one's values
    weights/first_values.py: tensor.name if expert is None else f"{tensor.name}.{expert}" -> tensor.name
    weights/test_first_values.py::test_no_two_tensors_experts_or_seeds_share_values
experts of a published file in another order
    state/shards.py: first = min(start + chunk * coordinate[axis], stop)
    -> first = min(start + chunk * (tensor.device_mesh.size(axis) - 1 - coordinate[axis]), stop)
    weights/test_audit.py::test_loaded_weights_pass_and_hashes_depend_on_neither_layout_nor_dtype
merge without the scaling
    adapters/save.py: slice(*columns)], alpha=target.scaling) -> slice(*columns)])
    adapters/test_stream.py::test_adapters_are_merged_as_the_command_merges_them
A of PEFT's file by rank, then expert
    adapters/peft_format.py: b.unflatten(1, (r, experts)).permute(2, 0, 1)
    -> b.unflatten(1, (experts, r)).permute(1, 0, 2)
    adapters/test_save.py::test_a_file_that_is_only_read_and_written_is_the_same_file
values of NF4 exchanged within a byte
    state/codes.py: torch.stack([table[byte & 15], table[byte >> 4]] -> torch.stack([table[byte >> 4], table[byte & 15]]
    weights/test_quantised.py::test_values_are_those_of_public_tools
scales of the neighbouring block
    state/codes.py: device=scales.device) // size - start // size
    -> device=scales.device) // (2 * size) - start // (2 * size)
    weights/test_quantised.py::test_values_are_those_of_public_tools
reference with its adapters on
    training/objective.py: with adapters_off(model) if self.adapters_off else nullcontext(): -> with nullcontext():
    training/test_dpo.py::test_planted_bugs_show
head of a reward model not trained
    step/loss.py: found = dict.fromkeys([*outside, *(head.parameters() if head is not None else [])])
    -> found = dict.fromkeys([] if is_reward_model(self.model) else [*outside, *head.parameters()])
    training/test_reward.py::test_a_reward_model_equals_trls
gradient of the divergence without the temperature
    step/vocabulary.py: ctx.save_for_backward(gradient_CW.mul_(temperature)) -> ctx.save_for_backward(gradient_CW)
    training/test_distill.py::test_the_divergence_has_torchs_value_and_gradient
teacher of another micro-batch
    step/objectives.py: self.teacher[int(batch["teacher"][0])] -> self.teacher[0]
    training/test_distill_parity.py::test_every_layout_equals_the_unsharded_models
images of a micro-batch in reverse
    data/images.py: batch.update(self._joined([made for _, _, made in found]))
    -> batch.update(self._joined([made for _, _, made in found[::-1]]))
    training/test_image_run.py::test_every_gradient_of_rows_with_images_is_exact
routes of the position before
    parallel/routes.py: route = routes[:, self._number] -> route = routes[:, self._number].roll(1, 0)
    parallel/test_routes.py::test_loss_and_gradients_equal_the_unsharded_model_with_the_same_routes
rows repeated after a resume
    data/loader.py: start = min(done, self.steps_in_epoch(epoch))
    -> start = min(max(done - 1, 0), self.steps_in_epoch(epoch))
    training/test_resume.py::test_a_stopped_run_continues_bit_for_bit
random generator of another rank restored
    checkpoint/small_files.py: files.read(header[kind], ((rank, rank + 1), -> files.read(header[kind], ((0, 1),
    checkpoint/test_layouts.py::test_random_generators_return_on_every_rank_that_the_saved_job_had
"""


class Bug(NamedTuple):
    """A row of the table."""

    name: str
    file: Path
    """In the repository."""
    old: str
    new: str
    test: str
    """Its id, from the repository's root."""


def bugs() -> list[Bug]:
    """Return the rows of the table."""
    rows = re.findall(r"^(\S.*)\n    (\S+?): (.*?)(?: |\n    )-> (.*)\n    (\S+)$", TABLE, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\S", TABLE, re.MULTILINE)), "a row of the table is not understood"
    return [Bug(name, PACKAGE / file, old, new, f"tests/{test}") for name, file, old, new, test in rows]


def planted(bug: Bug) -> str:
    """Return the text of its file with the bug. Raises `ValueError` unless what it replaces stands there once."""
    text = (ROOT / bug.file).read_text(encoding="utf-8")
    if text.count(bug.old) != 1 or bug.old == bug.new:
        raise ValueError(f"{bug.name}: {bug.old!r} stands {text.count(bug.old)} times in {bug.file}")
    return text.replace(bug.old, bug.new)


def is_seen(bug: Bug, source: Path) -> bool:
    """Run the bug's test on the copy `source` of src, with the bug in it meanwhile."""
    text, place = planted(bug), source / bug.file.relative_to("src")
    try:
        place.write_text(text, encoding="utf-8")
        return not _pass(source, [bug.test])
    finally:
        shutil.copy2(ROOT / bug.file, place)


def _pass(source: Path, tests: Iterable[str]) -> bool:
    """Return whether the tests pass on the copy `source` of src. Raises `RuntimeError` if one does not run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    path = {"PYTHONPATH": f"{source}:{ROOT}"}
    run = subprocess.run(command, cwd=ROOT, env=os.environ | path, capture_output=True, text=True)
    # 1: a test failed, or a fixture that runs the code under test; what cannot be collected gives 2.
    if run.returncode not in (0, 1):
        raise RuntimeError(f"these do not run: {[*tests]}\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return run.returncode == 0


def main(words: list[str]) -> int:
    """Print a line for each bug; return 1 if one is not seen."""
    chosen = [bug for bug in bugs() if not words or any(word in bug.name for word in words)]
    for bug in chosen:
        planted(bug)
    unseen = 0
    with tempfile.TemporaryDirectory(prefix="planted-") as directory:
        source = Path(shutil.copytree(ROOT / "src", Path(directory, "src")))
        if not _pass(source, dict.fromkeys(bug.test for bug in chosen)):
            raise RuntimeError("a test is red before a bug is planted")
        for bug in chosen:
            start, seen = time.monotonic(), is_seen(bug, source)
            unseen += not seen
            seconds = f"{time.monotonic() - start:4.0f} s"
            print(f"{'red' if seen else 'GREEN':5}  {seconds}  {bug.name}: {bug.test}", flush=True)
    print(f"{len(chosen) - unseen} of {len(chosen)} planted bugs are seen")
    return int(unseen > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
