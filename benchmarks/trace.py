"""Which streams of a GPU were busy at the same time, from a profiler's trace."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU does, in the trace format of torch's profiler."""

Interval = tuple[float, float]


class StreamUse(NamedTuple):
    """One stream: microseconds of work, and the part in which compute was busy, too."""

    stream: int
    busy: float
    hidden: float


def record(step: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Events of the trace of one step."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Torch warns whoever leaves out ``acc_events``; for one cycle it says the same.
    with profile(activities=activities, acc_events=True) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def stream_uses(events: Iterable[Mapping[str, Any]]) -> list[StreamUse]:
    """Use of each stream, the one with most work, which is compute, first."""
    work: defaultdict[int, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ON_DEVICE:
            begin = float(event["ts"])
            stream = int(event["args"]["stream"])
            work[stream].append((begin, begin + float(event.get("dur", 0.0))))
    joined = {stream: _joined(spans) for stream, spans in work.items()}
    order = sorted(joined, key=lambda stream: -_length(joined[stream]))
    return [
        StreamUse(
            stream,
            _length(joined[stream]),
            _length(_common(joined[stream], joined[order[0]])),
        )
        for stream in order
    ]


def idle_part(events: Iterable[Mapping[str, Any]]) -> float:
    """Of the time between the first and the last work of the device, that without any.

    0 without work of a device, as on a CPU.
    """
    spans = [
        (float(each["ts"]), float(each["ts"]) + float(each.get("dur", 0.0)))
        for each in events
        if each.get("cat") in ON_DEVICE
    ]
    if not spans:
        return 0.0
    joined = _joined(spans)
    return 1 - _length(joined) / (joined[-1][1] - joined[0][0])


def hidden_part(uses: Sequence[StreamUse]) -> float:
    """Of the work of the side streams, the part in which compute was busy; 0 to 1."""
    side = sum(use.busy for use in uses[1:])
    return sum(use.hidden for use in uses[1:]) / side if side else 0.0


def _joined(spans: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that are sorted and apart."""
    found: list[Interval] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _length(spans: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in spans)


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Time that is in both; each is sorted and apart."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin = max(one[i][0], other[j][0])
        end = min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return found
