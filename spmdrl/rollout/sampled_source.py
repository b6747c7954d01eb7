"""The source of batches whose rollouts this rank's engine replica samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.agents.gateway import Gateway
from spmdrl.agents.messages import JUDGE, judge_variables
from spmdrl.algorithms import registry
from spmdrl.config import Config, EvaluateSettings, SamplingSettings
from spmdrl.data.prompts import PromptSource
from spmdrl.data.tokenizer import end_token_ids
from spmdrl.engine.protocol import EngineProtocol, Truncation
from spmdrl.errors import Refusal
from spmdrl.model_inputs import TokenIds
from spmdrl.rewards.samples import Scope
from spmdrl.rollout.agent_episodes import AgentEpisodes
from spmdrl.rollout.chats import make_chats
from spmdrl.rollout.episode import Draw, FinishedEpisode, Group
from spmdrl.rollout.filling import StepFiller
from spmdrl.rollout.idle import Idle
from spmdrl.rollout.judging import NO_STEP_OF_JUDGE, EngineJudge
from spmdrl.rollout.link import Link
from spmdrl.rollout.loop import Loop
from spmdrl.rollout.outcomes import ProblemOutcome, outcomes_of
from spmdrl.rollout.packing import empty_rollouts
from spmdrl.rollout.serving import ServedRequests, publish, unpublish
from spmdrl.rollout.source import Source
from spmdrl.rollout.step_scores import score_step
from spmdrl.rollout.sums import warn_if_all_failed
from spmdrl.types import Batch, Rollouts
from spmdrl.workers.pool import RewardPool
from spmdrl.world.world import World

log = logging.getLogger(__name__)

_PROBE_PROMPTS = 16
_PROBE_TOKENS = 4096  # engines score prompts with all logits of a part of them at once


def group_hints(cfg: Config, scopes: Sequence[Scope]) -> list[str]:
    """Return hints on settings that group reward functions may not expect.

    Args:
        scopes: of the run's reward functions.
    """
    evaluate = cfg.evaluate
    if "group" not in scopes or not evaluate.every_steps or evaluate.samples > 1:
        return []
    return [
        "evaluate.samples: 1, so that reward functions that get a group in training get lists of "
        "one in evaluation; if they compare samples, set it to batch.group_size"
    ]


class SampledSource(Source):
    """Samples prompts on this rank's engine replica and scores them with its leader's workers.

    Only the leader has the groups. The replica's other ranks repeat each engine step.

    Raises (on construction): Refusal for data, reward functions or an environment that cannot
        be used.
    """

    def __init__(self, cfg: Config, world: World, *, tokenizer: PreTrainedTokenizerBase):
        self.cfg = cfg
        self.world = world
        self.prompts = PromptSource(cfg, tokenizer)
        self.link = Link(world)
        self.filler = None
        self._stops = end_token_ids(cfg, tokenizer)
        self._engine: EngineProtocol | None = None
        self._version = -1  # version of the weights at the last call of `generate`
        self._was_saved = False  # since that call
        self._finished: int | None = None  # version with which nothing is left to generate
        if world.replica_rank != 0:
            return
        self._gateway = self._start_gateway()
        environ = {}
        if self._gateway is not None and cfg.rewards.judge.is_on:
            environ = judge_variables(self._gateway.address, self._gateway.open(JUDGE))
        steps_per_epoch = self.prompts.steps_per_epoch
        self.pool = RewardPool(cfg, steps_per_epoch=steps_per_epoch, environ=environ)
        self.pool.start()  # an unusable reward function is refused now
        if world.rank == world.inference_ranks[0]:
            for hint in group_hints(cfg, self.pool.scopes):
                log.warning(hint)
        if "step" in self.pool.scopes and world.num_replicas > 1:
            raise Refusal(
                f"rewards.scope: a function sees whole steps, and each of {world.num_replicas} "
                "engine replicas has a share of one; set it to group, or have one replica"
            )
        if "step" in self.pool.scopes and cfg.rewards.judge.is_on:
            raise Refusal(f"rewards.scope: a function sees whole steps, and {NO_STEP_OF_JUDGE}")
        draw = self._make_draw("train", cfg.sampling, samples=cfg.batch.group_size)
        is_first = world.replica == 0
        chats = make_chats(cfg, tokenizer, self.pool, stops=self._stops, is_first=is_first)
        agents = None
        if cfg.rollout.has_agent:
            gateway = self._gateway if cfg.rollout.runs_agent else None
            agents = AgentEpisodes(cfg, pool=self.pool, gateway=gateway)
        judge = None
        if self._gateway is not None and cfg.rewards.judge.is_on:
            judge = EngineJudge(cfg, gateway=self._gateway, stops=self._stops)
        served = None
        if self._gateway is not None and cfg.rollout.serve:
            served = ServedRequests(cfg, gateway=self._gateway, stops=self._stops)
            publish(cfg, self._gateway, replica=world.replica)
        self.loop = Loop(
            cfg,
            tokenizer=tokenizer,
            pool=self.pool,
            link=self.link,
            chats=chats,
            agents=agents,
            judge=judge,
            served=served,
            gateway=self._gateway,
        )
        self.filler = StepFiller(cfg, world, loop=self.loop, prompts=self.prompts, draw=draw)

    def generate(self, engine: EngineProtocol, *, until: int) -> None:
        """Generate this replica's share of every step up to `until`, with the engine's weights.

        Under in-flight updates, generation of later steps stops as soon as the trainers have new
        weights; the next call continues it. After the last call for these weights, up to `lag`
        steps ahead, the engine lends its memory to the update.

        Raises: RewardFailed naming the sample if a reward fails under on_failure=fail;
            RuntimeError if dynamic sampling gets too few groups with a spread of rewards.
        """
        last = min(until, self.cfg.steps - 1)
        farthest = engine.version + self.cfg.lag  # last step that these weights sample
        is_finished = self._finished == engine.version and until <= farthest
        if not self.world.is_inference or is_finished:
            return
        self._engine = engine
        with self.world.watch.phase("generate", engine.version):
            # A run that resumes from a checkpoint has no keys and values of older weights.
            keeps = self.cfg.rollout.schedule.kv_cache == "keep" and not self._was_saved
            is_new = engine.version != self._version and not keeps
            # A judge's request may be left over that is in no checkpoint.
            if is_new or self.cfg.rewards.judge.is_on:
                self._restart_requests(engine)
            self._version = engine.version
            self._was_saved = False
            if not engine.is_busy:
                # Begin with an empty prefix cache: then the results depend on weights and step
                # alone, and a resumed run repeats them.
                engine.weights_changed(engine.version)
            if self.filler is None:
                self.link.follow(engine)
            else:
                in_flight = self.filler.schedule.in_flight
                is_ahead = in_flight and until > engine.version
                self.filler.fill(
                    engine,
                    last=last,
                    farthest=min(farthest, self.cfg.steps - 1) if in_flight else last,
                    must_pause=lambda: is_ahead and self.world.is_updated(engine.version),
                )
                self.link.end()
            if self.cfg.rollout.serve:
                # Requests of other programs wait until the engine samples again.
                self._restart_requests(engine)
        if until >= farthest:
            self._finished = engine.version
            engine.lend_memory()

    def take(self, step: int) -> Rollouts:
        """Return this rank's rollouts of `step`; only leaders have any."""
        if self.filler is None:
            return empty_rollouts()
        return self.filler.take(step) or empty_rollouts()

    def observe(self, batch: Batch, *, step: int) -> None:
        """Record the results of the whole batch of `step`, which may decide later prompts."""
        if self.filler is not None:
            self.filler.prompts.planner.observe(batch.scalars, step=step)

    def probe_tokens(self) -> list[TokenIds]:
        """Return the first prompts of the data that have more than one token, and a long sequence.

        The long sequence repeats their tokens up to the longest possible sample or 4096 tokens,
        whichever is shorter. It has no images.
        """
        prompts = [p for p in self.prompts.at(0)[:_PROBE_PROMPTS] if len(p.tokens) > 1]
        if not prompts:
            return []
        longest = self.cfg.longest_sequence - 1
        tokens = cycle(token for prompt in prompts for token in prompt.tokens)
        long = TokenIds(islice(tokens, min(longest, _PROBE_TOKENS)))
        return [*(p.tokens for p in prompts), long]

    def evaluate(self, engine: EngineProtocol, *, step: int) -> list[FinishedEpisode]:
        """Sample this replica's held-out prompts; only its leader returns the samples.

        Rewards are the functions' results without rewards.shaping. Raises as `generate`.
        """
        if not self.world.is_inference:
            return []
        self._restart_requests(engine)
        if self.filler is None:
            self.link.follow(engine)
            return []
        cfg = self.cfg.evaluate
        prompts = self.prompts.eval()
        draw = self._make_draw("eval", cfg, samples=cfg.samples)
        groups = [
            Group(slot, step, slot, prompt, engine.version, draw.of_prompt(prompt, self.cfg))
            for slot, prompt in islice(
                enumerate(prompts), self.world.replica, None, self.world.num_replicas
            )
        ]
        # An evaluation is not part of a step, so its idle time is not added to the step's.
        idle = self.loop.idle
        self.loop.idle = Idle()
        decisions = self.loop.decisions
        with self.loop.hold_back():
            decisions.begin("evaluate", version=engine.version, book=self.filler.book)
            for group in groups:
                self.loop.admit(group)
            while not all(group.is_complete for group in groups):
                self.filler.tick(engine)
            decisions.end()
        score_step(self.loop, groups, step=step)
        self.loop.idle = idle
        if self.loop.judge is not None:
            self.loop.judge.take_sums(is_first=True)
        self.link.end()
        samples = [sample for group in groups for sample in group.drawn_samples]
        warn_if_all_failed(samples, groups)
        return samples

    def outcomes(self, samples: Sequence[FinishedEpisode]) -> list[ProblemOutcome]:
        """Return the outcome of each held-out problem."""
        first = len(self.cfg.data.sources("train"))
        sources = self.cfg.data.sources("eval")
        several = enumerate(sources, first) if len(sources) > 1 else ()
        return outcomes_of(samples, names={i: source.name for i, source in several})

    def _restart_requests(self, engine: EngineProtocol) -> None:
        """Abort the unfinished requests and queue them again, with the drawn tokens as prompt.

        The engine computes the cache again for new weights in any case, and a resumed run, which
        has no cache, must give the same results.
        """
        aborted = engine.abort_all()
        if self.filler is not None:
            self.loop.requeue(aborted)

    def start(self, step: int) -> None:
        """Begin to write or repeat decisions at this step; see `Decisions`."""
        if self.filler is not None:
            self.loop.decisions.start(self.cfg, self.world, version=step)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the shares of later steps and the unfinished groups, as plain values.

        None on ranks that are not leaders. All ranks must call it.
        """
        self._was_saved = True
        return None if self.filler is None else self.filler.state_dict(self._engine)

    def load_state_dict(self, states: list[dict[str, Any]], step: int) -> None:
        """Deal the saved groups to this job's leaders. Their number may have changed."""
        if self.filler is not None:
            self.filler.load_state_dict(states, step)

    def close(self) -> None:
        """End the workers, and the gateway of agents."""
        if self.filler is not None:
            self.pool.close()
            if self._gateway is not None:
                self._gateway.close()
            if self.loop.served is not None:
                unpublish(self.cfg, replica=self.world.replica)

    def _start_gateway(self) -> Gateway | None:
        """Start the endpoint for agents, requests to a judge and other programs, if it has any."""
        rollout = self.cfg.rollout
        if not (rollout.runs_agent or self.cfg.rewards.judge.is_on or rollout.serve):
            return None
        gateway = Gateway(self.cfg)
        gateway.start()
        return gateway

    def _make_draw(
        self, purpose: str, how: SamplingSettings | EvaluateSettings, *, samples: int
    ) -> Draw:
        cfg = self.cfg
        advantage = registry.get("advantage", cfg.algorithm.advantage)
        return Draw(
            seed=cfg.seed,
            purpose=purpose,
            samples=samples,
            max_tokens=cfg.sampling.max_response_tokens,
            temperature=how.temperature,
            truncation=Truncation(how.top_p, how.top_k, how.min_p),
            penalties=cfg.sampling.penalties,
            stop=cfg.sampling.stop,
            is_seeded=cfg.engine.seed_per_request,
            stop_token_ids=self._stops,
            has_greedy=purpose == "train" and "greedy_rewards" in registry.inputs_of(advantage),
            must_score=cfg.rewards.on_failure == "fail",
        )
