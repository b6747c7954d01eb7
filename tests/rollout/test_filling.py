"""A replica's shares: the places of its engine, and what a resume with other rows keeps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmdrl.config import Config
from spmdrl.data.prompts import PromptSource
from spmdrl.rollout.decisions import Decisions
from spmdrl.rollout.episode import Draw, Episode, Trajectory
from spmdrl.rollout.filling import StepFiller
from spmdrl.rollout.idle import Idle
from spmdrl.tools.small_models.character_tokenizer import character_tokenizer
from spmdrl.world.spans import Spans
from tests.helpers.built import changed, made


class Loop:
    """Keeps the episodes of the groups that it is given, and draws nothing."""

    is_busy = False
    num_unsampled = 0

    def __init__(self) -> None:
        self.decisions = Decisions()
        self.idle = Idle()
        self.episodes: list[Episode] = []

    def start(self, episode: Episode) -> None:
        self.episodes.append(episode)

    def unfinished(self, engine: object) -> list[Episode]:
        return self.episodes


def rows(folder: Path, *, count: int = 8, plus: int = 1) -> None:
    """Write rows to rows.jsonl that ask for `count` sums, each with the right answer."""
    sums = [{"prompt": f"{i}+{plus}=", "answer": f"{i + plus}"} for i in range(count)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))


@pytest.fixture
def cfg(tmp_path) -> Config:
    rows(tmp_path)
    return made(
        data=dict(train=str(tmp_path / "rows.jsonl"), max_prompt_tokens=16),
        batch=dict(prompts_per_step=2, group_size=2),
        rollout=dict(schedule=dict(over_sample=2.0, balance="even")),
        checkpoint=dict(allow_config_change=True),
    )


def filler_of(cfg: Config, *, replica: int = 0) -> StepFiller:
    draw = Draw(cfg.seed, "train", cfg.batch.group_size, 8, 1.0, is_seeded=True, stop_token_ids=())
    watch = SimpleNamespace(spans=Spans())
    world: Any = SimpleNamespace(replica=replica, num_replicas=2, watch=watch)
    prompts = PromptSource(cfg, character_tokenizer())
    loop: Any = Loop()
    return StepFiller(cfg, world, loop=loop, prompts=prompts, draw=draw)


@pytest.mark.parametrize(
    "changes, places",
    [
        ({}, 4),
        (dict(rollout=dict(schedule=dict(over_sample=1.0))), 2),
        (dict(lag=2), 4),
        (dict(lag=2, rollout=dict(schedule=dict(in_flight=True))), 8),
        (dict(lag=2, rollout=dict(schedule=dict(in_flight=True)), engine=dict(max_num_seqs=5)), 5),
    ],
)
def test_an_engine_has_the_places_that_it_can_fill_at_once(cfg, changes, places):
    assert filler_of(changed(cfg, **changes)).loop.idle.width == places


def saved(cfg: Config) -> list[dict]:
    """Begin the groups that two replicas sample for step 0 and the next, and save them."""
    states = []
    for replica in range(2):
        filler = filler_of(cfg, replica=replica)
        for ticket in filler._update_book(0, last=0, is_pausing=False):
            group = filler._make_group(ticket, 0)
            filler.waiting[ticket.number] = group
            for sample in group.positions:
                filler.loop.start(
                    Episode(group, sample, Trajectory.from_prompt(group.prompt.tokens))
                )
        states.append(filler.state_dict(SimpleNamespace(version=0)))
        assert len(states[-1]["waiting"]) == 2
    return states


def test_groups_go_on_with_the_rows_that_they_began_with(cfg, caplog):
    filler = filler_of(cfg)
    filler.load_state_dict(saved(cfg), 0)
    assert len(filler.waiting) == 2 and len(filler.loop.episodes) == 4
    for episode in filler.loop.episodes:
        prompt = episode.group.prompt
        assert [*episode.trajectory.prompt] == [*prompt.tokens]
    assert not caplog.messages


OTHER = {
    "answers": lambda folder, cfg: rows(folder, plus=2) or cfg,
    "more rows": lambda folder, cfg: rows(folder, count=9) or cfg,
    "seed": lambda folder, cfg: changed(cfg, seed=cfg.seed + 1),
    "prompts per step": lambda folder, cfg: changed(cfg, batch=dict(prompts_per_step=4)),
    "samples per prompt": lambda folder, cfg: changed(cfg, batch=dict(group_size=3)),
}


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("what", OTHER)
def test_groups_of_other_rows_or_sizes_are_dropped_and_their_steps_are_sampled_again(
    what, replica, cfg, tmp_path, caplog
):
    states = saved(cfg)
    states[1]["ahead"] = {0: "the share of a complete step"}
    filler = filler_of(OTHER[what](tmp_path, cfg), replica=replica)
    filler.load_state_dict(states, 0)
    assert not filler.waiting and not filler.loop.episodes and not filler.ahead
    book = filler.book.book
    assert (filler.next, book.next, book.opened, book.left, book.waiting) == (0, 0, 0, {}, {})
    said = [text for text in caplog.messages if "4 groups under way" in text]
    assert len(said) == (replica == 0)
    assert all("rollouts of 1 later steps are dropped" in text for text in said)
    tickets = filler._update_book(0, last=0, is_pausing=False)
    assert tickets and all(ticket.step in (0, 1) for ticket in tickets)


def test_rows_that_changed_behind_a_name_of_the_hub_are_noticed(cfg, tmp_path, monkeypatch):
    # Of datasets of the hub the run knows only the name.
    monkeypatch.setattr("spmdrl.rollout.step_prompts.data_digests", lambda cfg: {})
    states = saved(cfg)
    rows(tmp_path, plus=2)
    filler = filler_of(cfg)
    filler.load_state_dict(states, 0)
    assert not filler.waiting
