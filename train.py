"""The program that every rank runs: `torchrun train.py --config FILE`, or `srun python train.py`.

Ranks [0, trainer_ranks) hold shards of the policy, the others an in-process engine (or
every rank both, in turns: `placement: colocated`). There is no driver: each rank walks through
the same lines. A line marked `# meets` can wait for other ranks: all of them, or those that it
names. Every rank executes them in the same order: in `train` all stand at the top level, in `main`
within `try`, `with` and an `if` that is answered alike on all ranks.

`generate` is called twice: with `lag: 0` the first call samples the batch that is trained on next;
with a lag the second samples those to come, beside the update, and the first finds its batch made.
Imports that load torch stand inside the functions, so that --help and --dry-run answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spmdrl.check.settings import parse
from spmdrl.config import Config

if TYPE_CHECKING:
    from spmdrl.world.world import World


def train(cfg: Config, world: World) -> int:
    """Run the experiment to its end, or to a requested stop, and return the exit status."""
    from spmdrl.algorithms import registry
    from spmdrl.certificate.writer import Certificate
    from spmdrl.check.methods import try_functions
    from spmdrl.checkpoint import Checkpointer
    from spmdrl.credit import advantages_of
    from spmdrl.data.tokenizer import load_tokenizer
    from spmdrl.engine import make_engine
    from spmdrl.evaluate import evaluate
    from spmdrl.exchange import exchange
    from spmdrl.report.derived import derived
    from spmdrl.report.report import Report
    from spmdrl.roles import make_trainer
    from spmdrl.rollout import make_source
    from spmdrl.rollout.metrics import batch_sums
    from spmdrl.sync.stream import WeightStream
    from spmdrl.types import add_sums

    # What is trained: two functions of tensors. One of your own may stand here instead; it is given
    # what its parameters name, see docs/methods.md. train/objectives/ adds correction, KL, entropy.
    loss_fn = registry.get(cfg.objective.loss_kind, cfg.loss_name)
    advantage_fn = registry.get("advantage", cfg.algorithm.advantage)
    try_functions(cfg, loss_fn=loss_fn, advantage_fn=advantage_fn)  # on three tokens

    # Every rank builds every part, which is empty on ranks that have no share in it.
    report = Report(cfg, world)  # meets: one folder for the logs
    source = make_source(cfg, world, tokenizer=load_tokenizer(cfg))  # prompts, rewards
    engine = make_engine(cfg, world)  # meets
    trainer = make_trainer(cfg, world, loss_fn=loss_fn, advantage_fn=advantage_fn)  # meets
    stream = WeightStream(trainer.weights, engine, world)  # meets: which slice goes to whom
    checkpoints = Checkpointer(cfg, world)
    state = checkpoints.restore(trainer, source)  # meets: step 0, or where a run had come to
    stream.release()  # colocated: the engines' memory is the trainers' until the next push
    trainer.size_microbatches()  # meets: by trying, if the config leaves it open
    agreed = trainer.check_packing()  # meets: trainers; rows are computed right, or stop
    pushed = stream.push(version=state.step)  # meets: proves the path before the first step
    probed = stream.probe(source.probe_tokens())  # meets: engine and trainer agree, or stop
    sizes = derived(cfg, tokens=world.tokens_per_microbatch)
    report.start(sizes, step=state.step, sums=add_sums(agreed, pushed, probed))
    certificate = Certificate(cfg, world, trainer, step=state.step, aside=report.attempt_folder)
    evaluated = evaluate(source, engine, trainer=trainer, step=state.step)  # meets: if due
    report.evaluation(state.step, evaluated)
    checkpoints.check(evaluated)  # what checkpoint.keep compares is measured

    world.started()  # from here on waits are shorter, and a signal saves first
    is_stopping = False
    for step in range(state.step, cfg.steps):
        source.generate(engine, until=step)  # meets: engine's ranks; all engines, if they steal
        batch = exchange(source, world, step=step)  # meets: rollouts to trainers
        source.observe(batch, step=step)  # lengths and rewards so far, for the prompts to come
        source.generate(engine, until=step + cfg.lag)  # meets: as above; beside the update
        stream.release()  # colocated: the engines' memory is the update's, until the push
        batch = trainer.annotate(batch, step=step)  # meets: trainers; what the two functions ask
        advantages = advantages_of(  # meets: trainers
            batch, advantage_fn, cfg=cfg, world=world, step=step
        )
        updated = trainer.update(batch, advantages, step=step)  # meets: trainers; by loss_fn
        world.announce_updated(step)  # engines in flight look for it in `generate`, and pause
        certificate.add(step, batch, advantages, updated)  # meets: trainers, if due
        is_stopping = world.agree_to_stop(step)  # meets: Ctrl-C or SIGTERM on any rank stops all
        pushed = stream.push(version=step + 1)  # meets: shards to engines
        sums = add_sums(batch_sums(batch), updated, pushed)
        report.step(step, sums, seconds=world.watch.take_seconds(), samples=batch.samples)
        evaluated = evaluate(source, engine, trainer=trainer, step=step + 1)  # meets: if due
        report.evaluation(step + 1, evaluated)
        checkpoints.maybe_save(  # meets: if it is time, or a save is under way
            step + 1, trainer, source, evaluated=evaluated, stop=is_stopping
        )
        if is_stopping:
            break

    checkpoints.finish()  # meets: the last one is on disk
    status = report.close("stopped" if is_stopping else "finished")  # meets: what was learnt
    source.close()
    engine.close()  # meets
    world.close()  # meets
    return status


def main() -> int:
    """Parse, refuse what is wrong with its reasons, and train."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
    cfg = parse()
    if cfg.dry_run:
        from spmdrl.check import dry_run

        return dry_run.show(cfg, train)
    from spmdrl.check.fit import check_fit
    from spmdrl.check.inputs import check_inputs
    from spmdrl.checkpoint.restore import already_finished
    from spmdrl.report.exit_status import exit_status
    from spmdrl.world.folder_lock import own_folder
    from spmdrl.world.leaving import ended
    from spmdrl.world.world import World

    world = None
    try:
        with own_folder(Path(cfg.output_dir)):  # one run to a folder
            check_fit(cfg)
            world = World.start(cfg)  # meets
            if already_finished(cfg, world):  # meets: as rank 0 finds it on disk
                status = exit_status(cfg, world)  # meets: as the attempt that finished it said
                world.close()  # meets
                return status
            check_inputs(cfg, world)  # meets: data, rewards, checkpoints, as --dry-run does
            return train(cfg, world)
    except (Exception, SystemExit) as error:
        return ended(error, world)  # says why, here and to the other ranks


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # peers may be gone: no thread or group of theirs may keep this process
