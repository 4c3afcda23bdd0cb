"""Blocks of a GPU's memory mapped to regions of addresses: `python -m tests.gpu.mapped_memory`.

Regions of random sizes are taken and given back, and hold what was written to them. Prints what
mapping costs by itself and beside products, and whether products are slowed down by it. Exits 1 if
a region holds anything else, or a block is lost.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time

import numpy as np
import torch

from manyroots.store.mapped_device import BLOCK_BYTES, MappedDevice, can_map

NUM_REGIONS, NUM_BLOCKS, MOST = 40, 200, 48


def check(memory: MappedDevice) -> int:
    """Random regions; gives how many held something else than was written."""
    rng, held, wrong = np.random.default_rng(0), dict[int, int](), 0
    for turn in range(400):
        region = int(rng.integers(NUM_REGIONS))
        if region in held:
            start = memory.start(region)
            last = start + held[region] * BLOCK_BYTES
            wrong += int((memory.data[start:last] != region + 1).any())
            memory.give_back(region)
            del held[region]
        count = int(rng.integers(1, MOST))
        if sum(held.values()) + count <= NUM_BLOCKS:
            memory.take(region, count * BLOCK_BYTES - int(rng.integers(100)))
            start = memory.start(region)
            memory.data[start : start + count * BLOCK_BYTES] = region + 1
            held[region] = count
        torch.cuda.synchronize()
        wrong += int(memory.num_used != sum(held.values()))
        if turn % 100 == 99:
            print(f"{turn + 1} turns, {wrong} wrong, {memory.num_used} blocks used", flush=True)
    for region in held:
        memory.give_back(region)
    return wrong


def switch(memory: MappedDevice, times: list[float], until: threading.Event) -> None:
    """Regions of 42 blocks (rank 16 of Qwen3-8B) by turns, each from the one before."""
    turn = 0
    while not until.is_set() and turn < 200:
        region = turn % NUM_REGIONS
        began = time.perf_counter()
        memory.take(region, (170 if turn % 2 else 42) * BLOCK_BYTES)
        times.append(time.perf_counter() - began)
        memory.give_back(region)
        turn += 1


def products(a: torch.Tensor) -> list[float]:
    """Milliseconds of single products."""
    taken = []
    for _ in range(400):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        a @ a
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last))
    return taken


def main() -> int:
    device = torch.device("cuda")
    if not can_map(device):
        print("this device can't map memory")
        return 1
    torch.zeros(1, device=device)
    began = time.perf_counter()
    memory = MappedDevice(NUM_REGIONS, MOST * 4 * BLOCK_BYTES, NUM_BLOCKS, device)
    taken = time.perf_counter() - began
    print(f"{NUM_BLOCKS} blocks made in {taken:.4f} s ({1e6 * taken / NUM_BLOCKS:.0f} us each)")
    wrong = check(memory)
    a = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)
    products(a)
    alone = products(a)
    never, times = threading.Event(), list[float]()
    switch(memory, times, never)
    print(f"switch alone: {1e3 * statistics.median(times):.2f} ms, {1e3 * max(times):.2f} at most")
    stop, beside = threading.Event(), list[float]()
    thread = threading.Thread(target=switch, args=(memory, beside, stop))
    thread.start()
    slowed = products(a)
    stop.set()
    thread.join()
    print(
        f"switch beside products: {1e3 * statistics.median(beside):.2f} ms "
        f"({len(beside)} of them, {1e3 * max(beside):.2f} at most)"
    )
    for name, ms in (("alone", alone), ("beside switches", slowed)):
        print(f"product {name}: {statistics.median(ms):.3f} ms, {max(ms):.3f} at most")
    memory.close()
    print(f"{wrong} regions wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
