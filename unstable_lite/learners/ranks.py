"""The ranks of one learner: processes that hold the same adapter and each compute a share of every update.

Owns torch.distributed: who meets whom, what is summed, and that a rank that fails takes no other one with it into a
wait without end. Every rank is given the whole batch and does all but the passes over the model for all of it, so that
what is divided is exactly these, and every rank makes the same step. Knows nothing of losses or algorithms. In a
process of its own, which never joined a group, all of this does nothing.

A rank waits for another in two ways. Between updates for the next message, however long that takes; its group is
`_messages`. Within one for a sum, `learner.update_timeout_s` at most. Every sum begins with a meeting in which each
says whether it is well: a rank whose memory ran out comes to it from its `together`, and so all of them begin anew.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from unstable_lite.errors import is_out_of_memory
from unstable_lite.learners.advantages import Figures
from unstable_lite.transport.messages import Message, decode, encode

NEVER = timedelta(days=365)
WELCOME = "unstable_lite/rank 0"
"""Under this name rank 0's spec stands at the rendezvous, for ranks of other machines."""

_WELL, _NO_MEMORY, _FAILED = range(3)

_messages: dist.ProcessGroup | None = None
_num_sums = 0


class RankFailed(RuntimeError):
    """Another rank of the learner could not go on with what all of them were doing."""


def join(store: Store, rank: int, num_ranks: int, device: str, timeout_s: float) -> None:
    """Wait for the other ranks, and belong together from here on.

    timeout_s: how long one rank waits for another, to come and then within an update.
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
    """Ranks that meet through a file, and speak through the loopback interface alone. path: new for each group."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    return FileStore(str(path), num_ranks)


def across_machines(address: str, timeout_s: float, is_first: bool = False) -> Store:
    """Ranks that meet where rank 0 listens. address: `HOST:PORT`; timeout_s: how long to wait until it does."""
    host, _, port = address.rpartition(":")
    patience = timedelta(seconds=timeout_s)
    return TCPStore(host, int(port), is_master=is_first, timeout=patience, wait_for_workers=False)


def rank() -> int:
    return dist.get_rank() if _messages is not None else 0


def num_ranks() -> int:
    return dist.get_world_size() if _messages is not None else 1


def num_sums() -> int:
    """How often gradients were summed up to now."""
    return _num_sums


# ----------------------------------------------------------------------------- between updates


def tell(message: Message) -> None:
    """From rank 0 to all others."""
    if _messages is not None:
        _send(encode([message]))


def hear() -> Message:
    """What rank 0 tells next. Raises RuntimeError where it is gone."""
    (message,) = decode(_receive())
    return message


@contextlib.contextmanager
def spread(directory: Path | None) -> Iterator[Path | None]:
    """The files of rank 0's `directory`, for the others in one of their own; nothing for rank 0 itself."""
    if rank() == 0:
        if _messages is not None:
            assert directory is not None
            files = sorted(path for path in directory.rglob("*") if path.is_file())
            _send("\n".join(str(path.relative_to(directory)) for path in files).encode())
            for path in files:
                _send(path.read_bytes())
        yield None
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


class together:
    """What one rank fails in, all fail in: none waits for one that will not come.

    Raises RankFailed on those that did not fail themselves; `is_out_of_memory` tells whether memory was the reason.
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
    """Every rank's gradient becomes the sum of all of them, to the same last bit: one flat all-reduce."""
    global _num_sums
    _num_sums += 1
    if num_ranks() == 1:
        return
    ours = list(parameters)
    flat = torch.cat([_gradient(parameter).flatten() for parameter in ours])
    _meet()
    dist.all_reduce(flat)
    for parameter, summed in zip(ours, torch.split(flat, [parameter.numel() for parameter in ours]), strict=True):
        parameter.grad = summed.view_as(parameter)


def sum_figures(figures: Figures) -> Figures:
    """Of all ranks, one by one."""
    if num_ranks() == 1:
        return figures
    summed = torch.from_numpy(figures.copy())
    _meet()
    dist.all_reduce(summed)
    return summed.numpy()


def sum_figure(figure: float) -> float:
    return float(sum_figures(np.array([figure]))[0])


def concat(figures_KN: Tensor) -> Tensor:
    """The columns of all ranks, in the order of the ranks, in float64 and on the CPU; each rank has its own number."""
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


def fill(rows: Sequence[int], per_item: list[Tensor], like: Tensor) -> None:
    """`per_item` has a tensor for each of this rank's `rows`; afterwards for every rank's. like: dtype and device."""
    if num_ranks() == 1:
        return
    own = [per_item[row] for row in rows]
    lengths_2I = torch.tensor([rows, list(map(len, own))], dtype=torch.float64).reshape(2, -1)
    all_rows, all_lengths = concat(lengths_2I).to(torch.int64)
    figures_N = concat(torch.cat([like.new_empty(0), *own])[None])[0].to(like)
    for row, part in zip(all_rows.tolist(), torch.split(figures_N, all_lengths.tolist()), strict=True):
        per_item[row] = part


# ---------------------------------------------------------------------------- the same everywhere


def copy_from_first(parameters: Mapping[str, nn.Parameter]) -> None:
    """Every rank begins with the values of rank 0."""
    if num_ranks() > 1:
        for parameter in parameters.values():
            dist.broadcast(parameter.data, src=0)


def check_alike(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises RankFailed where a rank's parameters are others than rank 0's: it made another step."""
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
            f"{differs.item():.0f} of {num_ranks()} learner ranks hold another adapter or critic than rank 0"
        )


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _meet() -> None:
    if num_ranks() > 1:
        conditions = _tell_how(_WELL)
        failed = [index for index, condition in enumerate(conditions) if condition != _WELL]
        if failed:
            how = "out of memory" if _NO_MEMORY in conditions and _FAILED not in conditions else "failing"
            raise RankFailed(f"learner rank {', '.join(map(str, failed))} is {how}")


def _tell_how(condition: int) -> list[int]:
    """Each rank's condition."""
    told = torch.zeros(num_ranks(), dtype=torch.int64)
    told[rank()] = condition
    dist.all_reduce(told)
    return [int(each) for each in told]
