"""The DFlash cache without an engine: capacity, collisions, speed, memory, and two devices.

What it prints is for one machine and one core of it; the figures go to ``loadtest/out``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from deepseek_flash.contract import Lookup
from deepseek_flash.dflash.encoder import EncoderUnsupported, PrefixEncoder
from deepseek_flash.dflash.entry import Eviction, Offer
from deepseek_flash.dflash.open import pick_device
from deepseek_flash.launcher.environment import LaunchError, resolve_model

from loadtest.bench import dflash_capacity, dflash_collisions, dflash_speed
from loadtest.bench.dflash_workload import OPERATIONS, Mix
from loadtest.bench.report import write_report

MIB = 2**20
MIXED, SAMPLE_EVERY = 100_000, 1_000
WARM_UP = 0.4  # of the samples; then everything that is remembered up to a limit is at it
MOST_GROWTH = 4.0  # MiB after the warm-up
LOOKED_UP = ("lookup exact", "lookup window", "lookup miss")
EVICTED = (Eviction.CAPACITY, Eviction.WINDOW, Eviction.TTL, Eviction.FLUSH)
COMPARED = 5_000  # operations on two devices


def growth(samples: Sequence[float], every: int, warm_up: float = WARM_UP) -> tuple[float, float]:
    """By how much the second half after the warm-up never fell back to the first half's lowest,
    and the slope of the line through both per 100,000 operations; in the samples' unit.

    The lowest, because the heap is ragged: a search's scratch memory makes it larger for a while.
    What leaks never comes back.
    """
    later = samples[int(len(samples) * warm_up) :]
    half = len(later) // 2
    slope = statistics.linear_regression(range(len(later)), later).slope
    return min(later[half:]) - min(later[:half]), slope * 100_000 / every


def memory(device: torch.device) -> dict[str, Any]:
    """A mix of operations with the process's memory sampled. ``sound``: nothing grew."""
    print(f"\nMemory, {MIXED:,} mixed operations", flush=True)
    mix, process = Mix(device), psutil.Process()
    table = mix.cache.table
    size, places = table.bytes_on_device, [tensor.data_ptr() for tensor in table.tensors]
    done: Counter[str] = Counter()
    resident, allocated = [], []
    for number in range(1, MIXED + 1):
        name, result = mix.step()
        done[f"lookup {result.result}" if isinstance(result, Lookup) else name] += 1
        if number % SAMPLE_EVERY == 0:
            on_device = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            resident.append(process.memory_info().rss / MIB)
            allocated.append(on_device / MIB)
        if number % (MIXED // 5) == 0:
            print(f"  {number:7,}  {len(table):4} entries  RSS {resident[-1]:.1f} MiB"
                  f"  CUDA {allocated[-1]:.2f} MiB", flush=True)  # fmt: skip
    table.check_integrity()
    rise, slope = growth(resident, SAMPLE_EVERY)
    device_rise, device_slope = growth(allocated, SAMPLE_EVERY)
    constant = table.bytes_on_device == size
    constant &= places == [tensor.data_ptr() for tensor in table.tensors]
    counts = {
        "operations": dict(done),
        "offers": {offer.value: table.offers[offer] for offer in Offer},
        "evictions": {reason.value: table.evictions[reason] for reason in Eviction},
    }
    print(
        f"  highest RSS {max(resident):.1f} MiB; after the warm-up: lowest {rise:+.2f} MiB,"
        f" slope {slope:+.2f} MiB per 100,000; CUDA {device_rise:+.3f} MiB\n"
        f"  table {size:,} bytes{'' if constant else ', NOT constant'}; integrity checked"
    )
    for what, by_name in counts.items():
        print(f"  {what}: {by_name}", flush=True)
    # What did not happen was not measured.
    happened = all(done[name] for name in (*OPERATIONS, *LOOKED_UP) if name != "lookup")
    happened &= all(table.evictions[reason] for reason in EVICTED)
    return {
        "rss_mib": resident, "rise_mib": rise, "slope_mib": slope, "cuda_rise_mib": device_rise,
        "cuda_slope_mib": device_slope, "table_bytes": size, **counts,
        "sound": constant and happened and rise < MOST_GROWTH and device_rise < 0.1,
    }  # fmt: skip


def compare(one: Mix, other: Mix, operations: int) -> Counter[str]:
    """The same mix twice; operations by name, and those with another result as 'different …'."""
    found: Counter[str] = Counter()
    for _ in range(operations):
        (name, result), (_, second) = one.step(), other.step()
        found[name] += 1
        found[f"different {name}"] += result != second
    return found


def agreement(device: torch.device) -> dict[str, Any]:
    """Whether CUDA gives what the CPU gives."""
    cuda = device if device.type == "cuda" else torch.device("cuda:0")
    if not torch.cuda.is_available():
        print("\nDevices: no CUDA here")
        return {"sound": True}
    found = compare(Mix(torch.device("cpu")), Mix(cuda), COMPARED)
    print(f"\nDevices, CPU and CUDA: {dict(found)}", flush=True)
    return {"operations": dict(found), "sound": not found["different lookup"]}


def load_encoder(model: str, device: torch.device) -> PrefixEncoder | None:
    try:
        return PrefixEncoder.load(resolve_model(model), device=device)
    except (LaunchError, EncoderUnsupported) as error:
        print(f"No encoder: {error}")
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--model", default="smollm2", help="whose first layers are the encoder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the cache's own process does
    begin, device = time.perf_counter(), pick_device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"On {name}, one thread", flush=True)
    # The encoder is loaded last: what it leaves in the heap would blur the memory's growth.
    figures: dict[str, Any] = {
        "device": name,
        "capacity": dflash_capacity.measure(device, dflash_capacity.Traffic()),
        "collisions": dflash_collisions.measure(device),
        "memory": memory(device),
        "agreement": agreement(device),
        "speed": dflash_speed.measure(device, load_encoder(arguments.model, device)),
        "seconds": time.perf_counter() - begin,
    }
    wrong = [part for part in ("collisions", "memory", "agreement") if not figures[part]["sound"]]
    wrong += [] if figures["speed"]["fast"] else ["speed"]
    path = write_report("bench-dflash-table", figures)
    print(f"\n{figures['seconds']:.0f} s; {path}")
    print(f"NOT as promised: {', '.join(wrong)}" if wrong else "All as promised.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
