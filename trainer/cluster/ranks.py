"""A rank of the trainer: its seat among the others, and its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer.errors import ConfigError
from trainer.policy.parallelism import Seat
from trainer.ranks_config import RanksConfig, TrainerSection


def starts_engines_early(trainer: TrainerSection) -> bool:
    """Whether engines on this machine start while the trainer loads its models: not if both use a
    GPU, because an engine measures at its start how much memory is free."""
    return device_of(trainer.device).type == "cpu"


def device_of(name: str, seat: Seat | None = None) -> torch.device:
    """The device that `trainer.device` names, a GPU or the CPU; with a `seat`, the rank's own GPU.

    Raises:
        ConfigError: this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and seat is not None:
        name = f"cuda:{seat.local_rank}"
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or not (name == kind or index.isdecimal())):
        raise ConfigError(f"trainer.device={name}: not a device; use cpu, cuda, cuda:N or auto")
    device = torch.device(name)
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigError(
            f"trainer.device={name}: PyTorch {torch.__version__} finds {gpus} CUDA GPUs here; use "
            "trainer.device=cpu or auto, or install a CUDA build of PyTorch and its driver"
        )
    return device


def torchrun_seat(environment: Mapping[str, str]) -> Seat | None:
    """This process's seat, from the environment variables of torchrun; None if they are not set."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    rank, size, local_rank = (
        int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    return Seat(rank, size, "env://", local_rank) if size > 1 else None


def ranks_here(config: RanksConfig, environment: Mapping[str, str]) -> int:
    """The number of ranks on this machine; torchrun may have started others elsewhere."""
    if torchrun_seat(environment) is None:
        return config.trainer.ranks
    return int(environment["LOCAL_WORLD_SIZE"])


def rendezvous_ports(environment: Mapping[str, str]) -> frozenset[int]:
    """The port at which the ranks that torchrun has started meet."""
    port = environment.get("MASTER_PORT", "")
    is_set = torchrun_seat(environment) is not None and port.isdigit()
    return frozenset({int(port)} if is_set else ())


def check_seat(config: RanksConfig, seat: Seat) -> None:
    """Checks that torchrun and the configuration have the same number of ranks.

    Raises:
        ConfigError: the numbers differ.
    """
    if config.trainer.ranks != seat.size:
        raise ConfigError(
            f"trainer.ranks={config.trainer.ranks}: torchrun has started {seat.size} ranks; "
            "give both the same number"
        )
