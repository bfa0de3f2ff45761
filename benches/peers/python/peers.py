#!/usr/bin/env python3
"""redis-py's asyncio lock under the work of ../rust/src/scenarios.rs; prints one line of JSON.

peers.py redis-py pair|contended --url URL --tasks N --seconds S
"""

import argparse
import asyncio
import json
import os
import time

import redis.asyncio


def percentile(numbers, share):
    return numbers[min(int(len(numbers) * share), len(numbers) - 1)] if numbers else None


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("scenario", choices=["pair", "own-names", "contended"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--tasks", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2)
    asked = parser.parse_args()
    client = redis.asyncio.Redis.from_url(asked.url, max_connections=asked.tasks + 1)
    name = f"bench:redis-py:{os.getpid()}"
    waits, pair_times, served = [], [], [0] * asked.tasks
    waiting = [None] * asked.tasks
    last, hand_offs = None, 0
    begin = time.perf_counter() + 0.4
    end = begin + asked.seconds

    async def contend(task):
        nonlocal last, hand_offs
        wanted = f"{name}:{task}" if asked.scenario == "own-names" else name
        while time.perf_counter() < end:
            start = waiting[task] = time.perf_counter()
            lock = client.lock(wanted, timeout=30)
            await lock.acquire()
            waiting[task] = None
            now = time.perf_counter()
            other, last = last != task, task
            await lock.release()
            if begin <= now < end:
                waits.append(now - start)
                pair_times.append(time.perf_counter() - start)
                served[task] += 1
                hand_offs += other

    tasks = [asyncio.create_task(contend(task)) for task in range(asked.tasks)]
    done, waiting_still = await asyncio.wait(tasks, timeout=0.4 + asked.seconds + 0.3)
    for task in done:
        task.result()
    for task in waiting_still:
        task.cancel()
    waits += [max(end - max(since, begin), 0) for since in waiting if since is not None]
    waits.sort()
    pair_times.sort()
    line = {
        "library": "redis-py",
        "scenario": asked.scenario,
        "tasks": asked.tasks,
        "seconds": asked.seconds,
    }
    if asked.scenario != "contended":
        line["pairs_per_s"] = len(pair_times) / asked.seconds
        line["p50_us"] = percentile(pair_times, 0.5) * 1e6
        line["p99_us"] = percentile(pair_times, 0.99) * 1e6
    else:
        line["hand_offs_per_s"] = hand_offs / asked.seconds
        line["wait_p50_ms"] = percentile(waits, 0.5) * 1e3
        line["wait_p99_ms"] = percentile(waits, 0.99) * 1e3
        line["most_served"] = max(served)
        line["least_served"] = min(served)
        line["starved"] = served.count(0)
    print(json.dumps(line), flush=True)
    os._exit(0)


asyncio.run(main())
