"""Ranks of one learner: processes that hold the same adapter and each compute a share of every update.

Owns torch.distributed: the rendezvous, the sums, and the guarantee that no rank waits forever for one that failed.
Every rank gets the whole batch and does everything but the passes over the model for all of it; so only the passes are
divided, and every rank makes the same step. Knows nothing of losses or algorithms. In a process that never joined a
group, all functions do nothing.

A rank waits for others in two ways: between updates without limit for the next message, in group `_messages`; within an
update for a sum, at most for `UPDATE_TIMEOUT_S`. Before every sum the ranks exchange their conditions: a rank
whose memory ran out gets there from `all_ranks_or_none`, and all of them restart the update.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from unstable_lite.errors import is_out_of_memory
from unstable_lite.learner import UPDATE_TIMEOUT_S
from unstable_lite.transport.codec import decode, encode
from unstable_lite.transport.messages import Message
from unstable_lite.transport.worker_main import WorkerSpec

Floats = npt.NDArray[np.float64]
NEVER = timedelta(days=365)
WELCOME = "unstable_lite/rank 0"
"""Key of rank 0's spec at the rendezvous, for ranks of other machines."""

_WELL, _NO_MEMORY, _FAILED = range(3)

_messages: dist.ProcessGroup | None = None
num_sums = 0
"""Number of sums of gradients so far."""


class RankFailed(RuntimeError):
    """Another rank of the learner failed in a common operation."""


def join_as(spec: WorkerSpec) -> None:
    """Join the group of the learner that `spec` belongs to; see `join`."""
    config = spec.config.learner
    if config.rendezvous is None:
        store = on_this_machine(Path(spec.rendezvous), spec.num_ranks)
    else:
        store = across_machines(config.rendezvous, spec.config.engine.start_timeout_s, is_first=spec.rank == 0)
        if spec.rank == 0:
            store.set(WELCOME, spec.to_line())
    join(store, spec.rank, spec.num_ranks, spec.device, UPDATE_TIMEOUT_S)


def join(store: Store, rank: int, num_ranks: int, device: str, timeout_s: float) -> None:
    """Wait for the other ranks and form a group with them.

    timeout_s: longest wait for another rank, to join and later within an update.
    """
    global _messages
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s))
    _messages = dist.new_group(backend="gloo", timeout=NEVER)


def leave() -> None:
    global _messages
    if _messages is not None:
        dist.destroy_process_group()
        _messages = None


def on_this_machine(path: Path, num_ranks: int) -> Store:
    """Return a store in the file `path`, new for each group, whose ranks use only the loopback interface."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    return FileStore(str(path), num_ranks)


def across_machines(address: str, timeout_s: float, is_first: bool = False) -> Store:
    """Return the store at `address`, `HOST:PORT`, on which rank 0 listens. timeout_s: longest wait for it."""
    host, _, port = address.rpartition(":")
    patience = timedelta(seconds=timeout_s)
    return TCPStore(host, int(port), is_master=is_first, timeout=patience, wait_for_workers=False)


def rank() -> int:
    return dist.get_rank() if _messages is not None else 0


def num_ranks() -> int:
    return dist.get_world_size() if _messages is not None else 1


# ----------------------------------------------------------------------------- between updates


def broadcast(message: Message) -> None:
    """Send from rank 0 to all others; another rank sends nothing."""
    if _messages is not None and rank() == 0:
        _send(encode([message]))


def receive() -> Message:
    """Return the next message of rank 0. Raises RuntimeError if rank 0 is gone."""
    (message,) = decode(_receive())
    return message


@contextlib.contextmanager
def broadcast_directory(directory: Path | None) -> Iterator[Path]:
    """Yield rank 0's `directory`, on the other ranks a copy of it."""
    if rank() == 0:
        assert directory is not None
        if _messages is not None:
            files = sorted(path for path in directory.rglob("*") if path.is_file())
            _send("\n".join(str(path.relative_to(directory)) for path in files).encode())
            for path in files:
                _send(path.read_bytes())
        yield directory
        return
    with tempfile.TemporaryDirectory() as name:
        for relative in _receive().decode().splitlines():
            path = Path(name, relative)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_receive())
        yield Path(name)


def _send(content: bytes) -> None:
    dist.broadcast(torch.tensor([len(content)]), src=0, group=_messages)
    if content:
        dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), src=0, group=_messages)


def _receive() -> bytes:
    size = torch.empty(1, dtype=torch.int64)
    dist.broadcast(size, src=0, group=_messages)
    content = torch.empty(int(size), dtype=torch.uint8)
    if len(content):
        dist.broadcast(content, src=0, group=_messages)
    return content.numpy().tobytes()


# ------------------------------------------------------------------------------ within an update


class all_ranks_or_none:
    """Make the body fail on all ranks if it fails on one, so that none waits forever.

    Raises RankFailed on those that did not fail themselves; its `is_out_of_memory` is true if memory was the reason.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            _meet()
        elif not isinstance(error, RankFailed) and num_ranks() > 1:
            _tell_how(_NO_MEMORY if is_out_of_memory(error) else _FAILED)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every rank's gradient by the sum of all, bit-identical on all ranks, with one flat all-reduce."""
    global num_sums
    num_sums += 1
    if num_ranks() == 1:
        return
    ours = list(parameters)
    flat = torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).flatten() for one in ours])
    _meet()
    dist.all_reduce(flat)
    for parameter, summed in zip(ours, torch.split(flat, [parameter.numel() for parameter in ours]), strict=True):
        parameter.grad = summed.view_as(parameter)


def sum_metrics(numbers: Floats) -> Floats:
    """Sum each number over all ranks."""
    if num_ranks() == 1:
        return numbers
    summed = torch.from_numpy(numbers.copy())
    _meet()
    dist.all_reduce(summed)
    return summed.numpy()


def concat(figures_KN: Tensor) -> Tensor:
    """Return the columns of all ranks, whose numbers may differ, in the ranks' order, in float64 on the CPU."""
    ours_KN = figures_KN.detach().to("cpu", torch.float64)
    if num_ranks() == 1:
        return ours_KN
    num_columns = torch.tensor([ours_KN.shape[1]])
    numbers = [torch.empty_like(num_columns) for _ in range(num_ranks())]
    _meet()
    dist.all_gather(numbers, num_columns)
    most = int(max(numbers))
    padded = torch.zeros(len(ours_KN), most, dtype=torch.float64)
    padded[:, : ours_KN.shape[1]] = ours_KN
    parts = [torch.empty_like(padded) for _ in range(num_ranks())]
    dist.all_gather(parts, padded)
    return torch.cat([part[:, : int(number)] for part, number in zip(parts, numbers, strict=True)], dim=1)


# ---------------------------------------------------------------------------- the same everywhere


def copy_from_first(parameters: Mapping[str, nn.Parameter]) -> None:
    """Copy the values of rank 0 to every rank."""
    if num_ranks() > 1:
        for parameter in parameters.values():
            dist.broadcast(parameter.data, src=0)


def check_alike(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise RankFailed if a rank's parameters differ from rank 0's, because it made a different step."""
    if num_ranks() == 1:
        return
    sums = torch.stack([parameter.detach().double().sum().cpu() for parameter in parameters.values()])
    expected = sums.clone()
    dist.broadcast(expected, src=0)
    ours, theirs = sums.numpy().tobytes(), expected.numpy().tobytes()
    differs = torch.tensor([float(ours != theirs)])
    dist.all_reduce(differs)
    if differs.item():
        raise RankFailed(
            f"{differs.item():.0f} of {num_ranks()} learner ranks hold a different adapter or critic than rank 0"
        )


def _meet() -> None:
    if num_ranks() > 1:
        conditions = _tell_how(_WELL)
        failed = [index for index, condition in enumerate(conditions) if condition != _WELL]
        if failed:
            how = "out of memory" if _NO_MEMORY in conditions and _FAILED not in conditions else "failing"
            raise RankFailed(f"learner rank {', '.join(map(str, failed))} is {how}")


def _tell_how(condition: int) -> list[int]:
    """Return each rank's condition."""
    told = torch.zeros(num_ranks(), dtype=torch.int64)
    told[rank()] = condition
    dist.all_reduce(told)
    return [int(each) for each in told]
