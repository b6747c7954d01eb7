"""Whether this rank's GPU can do what the config asks, checked before any group exists."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from spmdrl.config import Config, inference_ranks
from spmdrl.errors import Refusal
from spmdrl.world.launch import Launch, hides_gpus
from spmdrl.world.sealed_store import SealedStore

log = logging.getLogger(__name__)
_DRIVER = Path("/proc/driver/nvidia/version")
_GIB = 2**30
_CONTEXTS_GIB = 2.0  # what CUDA itself takes for the ranks of this job


def check_driver(cfg: Config) -> None:
    """Refuse a machine with GPUs that this torch cannot start.

    Raises: Refusal, also under layout.device auto, which would take the CPU silently.
    """
    if cfg.layout.device == "cpu" or hides_gpus() or torch.version.cuda is None:
        return
    if not torch.cuda.device_count() and not _DRIVER.exists():
        return  # no GPU here
    try:
        torch.cuda.init()
    except RuntimeError as error:
        raise Refusal(
            f"layout.device: the GPUs of {socket.gethostname()} cannot be used by torch "
            f"{torch.__version__}, which is built for CUDA {torch.version.cuda}: "
            f"{str(error).splitlines()[0]} Update the NVIDIA driver, or install the torch that is "
            "built for the driver's CUDA; to go on without GPUs, --layout.device cpu"
        ) from error


def check_memory(cfg: Config, launch: Launch, device: torch.device) -> None:
    """Refuse a GPU if other processes hold memory that the engine needs; warn on a trainer's GPU.

    Raises: Refusal.
    """
    free, total = (n / _GIB for n in torch.cuda.mem_get_info(device))
    where = f"GPU {device.index} of {socket.gethostname()} (rank {launch.rank})"
    generates = launch.rank in inference_ranks(cfg)
    wanted = cfg.engine.gpu_memory_frac * total
    if generates and cfg.engine.traits.reserves_memory and free + _CONTEXTS_GIB < wanted:
        raise Refusal(
            f"engine.gpu_memory_frac: {cfg.engine.gpu_memory_frac:g} of {total:.1f} GiB on {where} "
            f"is {wanted:.1f} GiB, and {free:.1f} GiB are free: another process has the rest. End "
            "it (nvidia-smi names it), take other GPUs by CUDA_VISIBLE_DEVICES, or lower it"
        )
    if free + _CONTEXTS_GIB < 0.9 * total:
        log.warning(
            "%s: %.1f of %.1f GiB are taken by another process (nvidia-smi names it)",
            where, total - free, total,
        )  # fmt: skip


def check_own_gpus(launch: Launch, device: torch.device, store: SealedStore) -> None:
    """Refuse ranks that share a GPU, since NCCL needs one for each. Every rank calls it.

    Args:
        store: of the job.
    Raises: Refusal on every rank.
    """
    properties = torch.cuda.get_device_properties(device)
    place = [socket.gethostname(), str(getattr(properties, "uuid", device.index))]
    store.set(f"gpu/{launch.rank}", json.dumps(place))
    places = [json.loads(store.get(f"gpu/{rank}")) for rank in range(launch.world_size)]
    if shared := sharing(dict(enumerate(map(tuple, places)))):
        first, second, host = shared
        raise Refusal(
            f"ranks {first} and {second} both have GPU {device.index} of {host}, and NCCL wants "
            "one for each. Start one rank per GPU: torchrun --nproc-per-node, or --ntasks-per-node "
            "without --gpus-per-task and --gpu-bind, sets each rank's own LOCAL_RANK; or let ranks "
            "share a GPU, slowly, by --layout.backend gloo"
        )


def sharing(places: Mapping[int, tuple[str, str]]) -> tuple[int, int, str] | None:
    """Return two ranks on one GPU and their host, from {rank: (host, GPU)}; None if none share."""
    first: dict[tuple[str, str], int] = {}
    for rank, place in places.items():
        if place in first:
            return first[place], rank, place[0]
        first[place] = rank
    return None


def warn_of_detours(launch: Launch) -> None:
    """Warn, once per node, of GPUs of this node without peer access."""
    count = torch.cuda.device_count()
    if launch.local_rank or count == 1:
        return
    apart = [
        f"{a} and {b}"
        for a in range(count)
        for b in range(a + 1, count)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        more = f" and {len(apart) - 1} more pairs" if len(apart) > 1 else ""
        log.warning(
            "GPUs %s%s of %s have no peer access: their messages go through the host. FSDP2's "
            "gathers, layout.tp, cp, ep and inference_tp, and the weight stream slow down, and "
            "vLLM cannot use its own all-reduce",
            apart[0], more, socket.gethostname(),
        )  # fmt: skip
