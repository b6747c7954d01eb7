"""Several epochs over one batch, against PPO's algorithm in plain PyTorch, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM

from spmdrl.algorithms.masked import keep
from spmdrl.check.methods import depends_on_distance, try_functions
from spmdrl.check.settings import validate
from spmdrl.report.config_sizes import config_sizes
from spmdrl.train.trained_model import in_epochs
from tests.helpers.comparing import (
    assert_near,
    assert_same_sums,
    differing,
    full_parameters,
    full_state,
)
from tests.helpers.policy_runs import (
    LENGTHS,
    VALID,
    advantages,
    changed,
    config,
    microbatch,
    own_batch,
    scalars,
    sequence,
    small_model,
    step_as_train_does,
    train,
    update,
)
from tests.helpers.worlds import with_trainer


def test_the_first_epoch_has_the_batchs_order_and_later_ones_orders_of_their_own():
    updates = [object() for _ in range(12)]
    found = in_epochs(updates, epochs=4, seed=3, step=5)
    epochs = [found[i : i + 12] for i in range(0, 48, 12)]
    assert epochs[0] == updates
    assert all(sorted(map(id, one)) == sorted(map(id, updates)) for one in epochs)
    assert len({tuple(map(id, one)) for one in epochs}) == 4
    assert found == in_epochs(updates, epochs=4, seed=3, step=5)
    assert in_epochs(updates, epochs=2, seed=3, step=5) == found[:24]
    for seed, step in ((4, 5), (3, 6)):
        assert in_epochs(updates, epochs=2, seed=seed, step=step) != found[:24]
    assert in_epochs(updates, epochs=1, seed=0, step=0) == updates


def _sequence_logprobs(model: torch.nn.Module, index: int) -> torch.Tensor:
    """Logprobs of a sequence's response, [n] float64, at the temperature of sampling."""
    tokens = sequence(index)
    logits = model(tokens[None]).logits[0, :-1] / 0.8
    of_tokens = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return of_tokens[(len(tokens) + 2) // 3 - 1 :]


def _by_hand(folder: Any, *, step: int, epochs: int, updates: int) -> dict[str, torch.Tensor]:
    """PPO's algorithm 1 in float64: the parameters after K epochs over the batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    embedding = model.get_input_embeddings().weight
    decayed = [p for p in model.parameters() if p.dim() > 1 and p is not embedding]
    rest = [p for p in model.parameters() if p.dim() < 2 or p is embedding]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    rows = scalars()
    kept = [i for i in range(len(LENGTHS)) if rows.is_valid[i]]
    rollout = {}
    for i in kept:
        one = microbatch([i])
        rollout[i] = one.rollout_logprobs[one.response_mask].double()
    with torch.no_grad():
        old = {i: _sequence_logprobs(model, i) for i in kept}
    of_update = [[i for i in kept if i // 2 % updates == u] for u in range(updates)]
    for own in in_epochs(of_update, epochs=epochs, seed=0, step=step):
        loss, count = torch.zeros(()).double(), 0
        for i in own:
            ratio, advantage = (_sequence_logprobs(model, i) - old[i]).exp(), advantages()[i]
            weight = (old[i] - rollout[i]).exp().clamp(max=2.0)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss, count = loss - (weight * surrogate).sum(), count + len(ratio)
        optimizer.zero_grad()
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _one_step(trainer: Any, step: int) -> dict:
    sums = update(trainer, own_batch(trainer.world), step=step)
    return {"sums": sums, "parameters": full_parameters(trainer)}


def test_epochs_train_as_ppo_by_hand_does(tmp_path):
    folder = small_model(tmp_path)
    cfg = changed(config(folder, tmp_path, updates=3), batch={"epochs": 3})
    step = next(  # at which the second epoch's order matters
        s for s in range(9) if in_epochs("abc", epochs=2, seed=0, step=s)[3:] != list("abc")
    )
    ours = with_trainer(cfg, _one_step, step)[0]
    theirs = _by_hand(folder, step=step, epochs=3, updates=3)
    assert_near(
        {name: p.double() for name, p in ours["parameters"].items()},
        {name: theirs[name] for name in ours["parameters"]},
        rtol=1e-4,
        atol=5e-6,
    )
    ratio, count = ours["sums"]["policy/ratio"]
    num_tokens = sum(len(one) for one in _response_masks())
    assert count == 3 * num_tokens and ratio != count
    assert ours["sums"]["policy/kl_old_last"][1] == num_tokens
    assert ours["sums"]["policy/clip_frac_last"][1] == num_tokens
    assert ours["sums"]["perf/trained_tokens"] == (3 * sum(LENGTHS), 1.0)


def _response_masks() -> list[torch.Tensor]:
    marked = [microbatch([i]).response_mask for i in range(len(LENGTHS)) if scalars().is_valid[i]]
    return [mask[mask] for mask in marked]


def test_epochs_do_not_depend_on_the_mesh(tmp_path):
    folder = small_model(tmp_path)
    cfg = changed(config(folder, tmp_path, updates=2), batch={"epochs": 2})
    reference = train(cfg)[0]
    assert reference["sums"][0]["policy/kl_old_last"][0] != 0
    for rank, ours in enumerate(train(changed(cfg, layout={"world_size": 2}))):
        assert_same_sums(ours["sums"], reference["sums"], f"rank {rank}", rel=1e-5, abs_=1e-5)
        assert_near(ours["parameters"], reference["parameters"], "", rtol=1e-5, atol=2e-6)


def _round_trip(trainer: Any) -> tuple:
    """Save after a step, take another; restore, take it again: both models."""
    own = own_batch(trainer.world, rewards=torch.arange(len(LENGTHS)).double())
    first = step_as_train_does(trainer, own, step=0)[2]
    saved = tree_map(torch.clone, trainer.state_dict())
    ends = []
    for _ in range(2):
        sums = step_as_train_does(trainer, own, step=1)[2]
        ends.append((sums, full_state(trainer)))
        trainer.load_state_dict(saved)
    return first, ends


@pytest.mark.proves("epochs", "critic")
def test_a_restored_step_repeats_its_epochs_and_the_critic_has_its_own(tmp_path):
    cfg = config(small_model(tmp_path), tmp_path, advantage="gae", updates=2)
    cfg = changed(cfg, batch={"epochs": 3}, critic={"epochs": 5, "clip": 0.2, "lr": 2e-2})
    first, ((sums, after), (again, repeated)) = with_trainer(cfg, _round_trip)[0]
    assert sums == again
    assert not differing(after, repeated)
    assert int(after["optimizer.updates"]) == 2 * 2 * 3
    assert int(after["critic.optimizer.updates"]) == 2 * 2 * 5
    assert first["value/skipped_updates"] == first["policy/skipped_updates"] == (0.0, 1.0)


def _of(**fields: Any) -> list[str]:
    return [text for text in validate(changed(VALID, **fields)) if "epochs" in text]


def test_epochs_that_would_be_wrong_are_refused_by_name():
    assert not _of(batch={"epochs": 4})
    for loss in ("reinforce", "sft"):
        found = _of(batch={"epochs": 4}, algorithm={"loss": loss})
        assert len(found) == 1 and found[0].startswith(f"batch.epochs: 4 with the loss {loss}, ")
    for objective in ("sft", "preference", "distill"):
        loss = {"preference": "dpo", "distill": "divergence"}.get(objective, "ppo_clip")
        chosen = {"objective": objective, "loss": loss}
        found = _of(batch={"epochs": 2}, algorithm=chosen, layout={"placement": "offline"})
        assert len(found) == 1 and f"with algorithm.objective {objective}" in found[0]
    assert not _of(algorithm={"loss": "reinforce"})


@pytest.mark.parametrize("loss", ["aipo", "cispo", "dro", "gspo", "kimi", "m2po", "topr", "vespo"])
def test_a_loss_with_a_ratio_or_a_pull_may_have_epochs(loss):
    from spmdrl.algorithms import registry

    assert depends_on_distance(registry.get("loss", loss), {})


def _plain(logprobs, advantages, loss_mask):
    return keep(-logprobs * advantages, loss_mask), {}


def test_a_loss_in_train_py_without_a_ratio_is_refused_too():
    from spmdrl.algorithms import registry

    own = {"advantage_fn": registry.get("advantage", "grpo"), "loss_fn": _plain}
    try_functions(VALID, **own)
    with pytest.raises(ValueError, match="batch.epochs: 2 with the loss _plain, "):
        try_functions(changed(VALID, batch={"epochs": 2}), **own)


def test_derived_sizes_name_the_epochs():
    cfg = changed(VALID, batch={"epochs": 3, "updates_per_step": 2})
    assert config_sizes(cfg)["optimizer steps per step"] == "2, of about 256 sequences, 3 times"
    assert cfg.batch.optimizer_steps == 6


def test_old_logprobs_get_a_pass_of_their_own():
    from spmdrl.train.objectives.objective_loss import needed_columns

    assert needed_columns(VALID) == set()
    assert needed_columns(changed(VALID, batch={"epochs": 2})) == {"old_logprobs"}
