"""Peak rates of GPUs from their data sheets, for plans and for utilisation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spmdrl.plain import record


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU in its usual node. Bandwidths are per GPU and direction."""

    name: str
    memory_gib: float  # that a process sees
    flops: float  # dense bfloat16, 1/s
    memory_bytes_per_s: float
    node_bytes_per_s: float  # to the other GPUs of its node (NVLink)
    network_bytes_per_s: float  # to other nodes
    host_bytes_per_s: float  # to its host's memory (PCIe)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 79.0, 312e12, 2.04e12, 300e9, 25e9, 32e9),  # SXM 80 GB, 8 x 200 Gb/s
        Gpu("H100", 79.0, 989e12, 3.35e12, 450e9, 50e9, 64e9),  # SXM 80 GB, 8 x 400 Gb/s
        Gpu("H200", 139.0, 989e12, 4.8e12, 450e9, 50e9, 64e9),  # SXM 141 GB, 8 x 400 Gb/s
        Gpu("B200", 178.0, 2250e12, 8.0e12, 900e9, 50e9, 64e9),  # SXM 180 GB, 8 x 400 Gb/s
    )
}


@record
@dataclass(frozen=True)
class LinkCost:
    """Cost of messages between ranks."""

    bytes_per_s: float  # of one rank, in one direction
    round_s: float  # before the first byte of messages that start together
    message_s: float  # each of them
    copy_bytes_per_s: float  # from memory to memory of one device

    def at(self, gbit_per_s: float) -> LinkCost:
        """Return the same with another rate in 1e9 bits/s; 0 for none."""
        if not gbit_per_s:
            return self
        return replace(self, bytes_per_s=gbit_per_s * 1e9 / 8)


CPU_LINK = LinkCost(2e9, 1e-3, 50e-6, 4e9)
"""Of gloo on one machine, as benchmarks/results/stream.md has it."""
LINK_FRAC = 0.7  # of a link's bandwidth, reached in collectives
MEMORY_FRAC = 0.7  # of a memory's bandwidth, reached in copies and in decoding


def gpu_link(gpu: Gpu, *, is_one_node: bool) -> LinkCost:
    """Return the cost of NCCL messages to GPUs of the same node, or of other nodes."""
    bandwidth = gpu.node_bytes_per_s if is_one_node else gpu.network_bytes_per_s
    # Assumed: 50 us to start a group of messages, 5 us each; a copy reads and writes.
    return LinkCost(bandwidth * LINK_FRAC, 50e-6, 5e-6, gpu.memory_bytes_per_s * MEMORY_FRAC / 2)


def known_gpu(device_name: str) -> Gpu | None:
    """Return the table's entry for a name of `torch.cuda.get_device_name`; None without one.

    PCIe and half-size variants, which run at other clocks, have no entry.
    """
    if "PCIe" in device_name or "NVL" in device_name or "MIG" in device_name:
        return None
    return next((gpu for name, gpu in GPUS.items() if name in device_name), None)
