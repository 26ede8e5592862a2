"""Peak memory that a function allocates, by the allocator's count; resident memory would include other code's."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(function: Callable[[], object], device: str = "cpu") -> int:
    """Return the peak bytes of tensors while `function` runs, less those that existed before."""
    if device != "cpu":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    assert profile.profiler is not None
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
