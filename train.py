"""The program that every rank runs: `torchrun train.py --config FILE`, or `srun python train.py`.

Ranks [0, trainer_ranks) hold shards of the policy, the others an engine in their own process (or
every rank both, in turns: `placement: colocated`). There is no driver: every rank executes the
same lines in the same order. The comment at the end of a line says who waits for whom in it:

    # all         every rank, for all others
    # trainers    the trainer ranks, for each other
    # replica     the ranks of an engine replica, for each other; under rollout.schedule.balance
                  `steal` the replicas too

No rank may skip or repeat such a line alone. The other lines wait for nobody.

`generate` is called twice. With `lag: 0` the first call samples the batch that is trained on next.
With a lag the second call samples a later batch, while the trainers update.
"""

from __future__ import annotations

import signal
from pathlib import Path

import spmdrl.api as rl  # imports a part when it is first used: --help answers without torch
from spmdrl.check.settings import parse
from spmdrl.config import Config


def train(cfg: Config, world: rl.World) -> int:
    """Run the experiment to its end, or to a requested stop, and return the exit status."""
    # What is trained: two functions of tensors. One of your own may stand here instead; it gets
    # what its parameters name, see docs/methods.md. train/objectives/ adds correction, KL, entropy.
    loss_fn = rl.registry.get(cfg.objective.loss_kind, cfg.loss_name)
    advantage_fn = rl.registry.get("advantage", cfg.algorithm.advantage)
    rl.try_functions(cfg, loss_fn=loss_fn, advantage_fn=advantage_fn)  # on three tokens

    # Every rank makes every part. A part is empty on ranks that have no share in it.
    report = rl.Report(cfg, world)  # all: one folder for the logs
    source = rl.make_source(cfg, world, tokenizer=rl.load_tokenizer(cfg))  # prompts, rewards
    engine = rl.make_engine(cfg, world)  # all
    trainer = rl.make_trainer(cfg, world, loss_fn=loss_fn, advantage_fn=advantage_fn)  # all
    stream = rl.WeightStream(trainer.weights, engine, world)  # all: which slice goes to whom
    checkpoints = rl.Checkpointer(cfg, world)
    state = checkpoints.restore(trainer, source)  # all: step 0, or where the run goes on
    proved = prove(trainer, stream, source, step=state.step)  # all
    certificate = rl.Certificate(cfg, world, trainer, step=state.step, aside=report.attempt_folder)
    report.start(proved, step=state.step, certify=certificate.add, trainer=trainer)
    evaluated = rl.evaluate(source, engine, trainer, step=state.step)  # all: if it is due
    report.evaluation(state.step, evaluated)
    checkpoints.check(evaluated)  # the metric of checkpoint.keep is measured

    world.started()  # from here on waits are shorter, and a signal saves first
    for step in range(state.step, cfg.steps):
        source.generate(engine, until=step)  # replica
        batch = rl.exchange(source, world, step=step)  # all: rollouts to trainers
        source.generate(engine, until=step + cfg.lag)  # replica: while the trainers update
        batch = trainer.annotate(batch, step=step)  # trainers: what the two functions ask for
        advantages = rl.advantages_of(  # trainers
            batch, advantage_fn, cfg=cfg, world=world, step=step
        )
        updated = trainer.update(batch, advantages, step=step)  # trainers: by loss_fn
        pushed = stream.push(version=step + 1)  # all: shards to engines
        evaluated = rl.evaluate(source, engine, trainer, step=step + 1)  # all: if it is due
        report.step(step, batch, advantages, updated, pushed, evaluated)  # trainers
        if checkpoints.save_or_stop(step + 1, trainer, source, evaluated):  # all: any rank's signal
            break

    checkpoints.finish()  # all: the last checkpoint is on disk
    status = report.close("stopped" if checkpoints.is_stopped else "finished")  # all
    source.close()
    engine.close()  # all
    world.close()  # all
    report.write_page()  # by rank 0, when nobody waits any more
    return status


def prove(
    trainer: rl.Trainer | rl.NullTrainer, stream: rl.WeightStream, source: rl.Source, *, step: int
) -> rl.Sums:
    """Prove on this machine and model what the loop relies on; a proof that fails ends the run.

    Args:
        step: steps already done, which is the version of the first weights.
    Returns: what was measured.
    """
    trainer.size_microbatches()  # all: the largest that fit, if the config leaves it open
    packed = trainer.check_packing()  # trainers: packed rows are computed as single ones
    pushed = stream.push(version=step)  # all: engines hold what trainers sent
    probed = stream.probe(source.probe_tokens())  # all: both compute the same logprobs
    return rl.add_sums(packed, pushed, probed)


def main() -> int:
    """Parse, refuse what is wrong with its reasons, and train."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
    cfg = parse()
    if cfg.dry_run:
        return rl.dry_run.show(cfg, train)
    world = None
    try:
        with rl.own_folder(Path(cfg.output_dir)):  # one run to a folder
            rl.check_fit(cfg)
            world = rl.World.start(cfg)  # all
            if rl.already_finished(cfg, world):  # all: as rank 0 finds it on disk
                status = rl.exit_status(cfg, world)  # all: that of the attempt that finished it
                world.close()  # all
                return status
            rl.check_inputs(cfg, world)  # all: data, rewards, checkpoints, as --dry-run does
            return train(cfg, world)
    except (Exception, SystemExit) as error:
        return rl.report_end(error, world)  # says why, here and to the other ranks


if __name__ == "__main__":
    status = main()
    rl.end_process(status)
