#!/usr/bin/env python3
"""Runs leasehold and its peers in turn and writes what came of it. scripts/bench builds them and calls this.

compare.py --rust BIN [--go BIN] [--java FOLDER] [--python PYTHON] --out FOLDER [--results FILE] [--quick]

FOLDER gets performance.md and plots/*.svg, FILE a line of JSON per run. Every number is the median over the rounds,
and every ratio the median of the ratios within a round.
"""

import argparse
import atexit
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import plots

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = "leasehold"
RUST = [OURS, "bare-fred", "bare-redis", "rslock", "rlock", "nadis"]
PEERS = ["rslock", "rlock", "nadis", "redisson", "redsync", "redis-py"]
KINDS = ["fair", "write", "read", "multi"]
PARTS = ["pair", "own-names", "contended", "processes", "waiters", "kinds", "memory", "growth", "holds"]


class Server:
    """A redis-server of our own, in a folder of its own, on a free port."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="leasehold-bench-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", self.folder]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        atexit.register(self.end)
        for _ in range(100):
            try:
                if self.ask("PING") == "+PONG":
                    break
            except OSError:
                pass
            time.sleep(0.05)
        else:
            sys.exit("redis-server does not answer")
        self.url = f"redis://127.0.0.1:{self.port}"

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, *words):
        """One command; the first line of its answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall((" ".join(words) + "\r\n").encode())
            return connection.makefile().readline().strip()

    def version(self):
        output = subprocess.run(["redis-server", "--version"], capture_output=True, text=True).stdout
        return output.split("v=")[1].split()[0] if "v=" in output else "?"


class Bench:
    def __init__(self, asked):
        self.asked, self.quick = asked, asked.quick
        self.server, self.second = Server(), Server()
        self.results, self.failures = [], []
        self.began = time.monotonic()
        self.others = []
        if asked.java:
            self.others.append("redisson")
        if asked.go:
            self.others.append("redsync")
        if asked.python:
            self.others.append("redis-py")

    def command(self, library):
        asked = self.asked
        if library.startswith("redisson"):
            path = f"{asked.java}/peers.jar:{asked.java}/lib/*"
            return ["java", "-Xmx256m", "-cp", path, "peers.Peers", library]
        if library == "redsync":
            return [asked.go, library]
        if library == "redis-py":
            return [asked.python, f"{HERE}/python/peers.py", library]
        return [asked.rust, library]

    def run(self, library, scenario, round_number, limit=120, command=None, called=None, **options):
        """One run on an empty server; its line, or None when it failed. `called`: what its scenario counts as."""
        self.server.ask("FLUSHALL")
        line = list(command or self.command(library)) + [scenario, "--url", self.server.url]
        tail = options.pop("tail", [])
        for key, value in options.items():
            line += [f"--{key}", str(value)]
        shown = " ".join(f"{key} {value}" for key, value in options.items() if key != "url2")
        print(f"[{time.monotonic() - self.began:5.0f} s] {library} {scenario} {shown}", end=" ", flush=True)
        try:
            done = subprocess.run(
                line + tail, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL
            )
            lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
            if done.returncode != 0 or not lines:
                raise RuntimeError(done.stderr.strip()[-300:])
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as problem:
            print("FAILED", problem)
            self.failures.append(f"{library} {scenario}")
            return None
        for found in lines:
            found["round"] = round_number
            found["scenario"] = called or scenario
            self.results.append(found)
        brief = ("p50_us", "pairs_per_s", "hand_offs_per_s", "ratio", "server_cpu_us_per_renewal")
        print(", ".join(f"{key} {lines[-1][key]:.4g}" for key in brief if key in lines[-1]))
        return lines[-1]

    def all(self, parts):
        for part in parts:
            getattr(self, part.replace("-", "_"))(1 if self.quick else 5, 0.7 if self.quick else 1.5)
            if self.asked.results:
                with open(f"{self.asked.results}.part", "w") as file:
                    file.writelines(json.dumps(line) + "\n" for line in self.results)

    def pair(self, rounds, seconds):
        for number in range(rounds):
            for library in ["ping-tcp", "ping-fred"] + RUST + self.others:
                self.run(library, "pair", number, tasks=1, seconds=seconds)

    def own_names(self, rounds, seconds):
        for number in range(rounds):
            for tasks in (16, 256):
                for library in RUST + (self.others if number < 3 else []):
                    self.run(library, "own-names", number, tasks=tasks, seconds=seconds)
        for number in range(1 if self.quick else 2):
            for tasks in (1, 4, 64):
                for library in RUST:
                    self.run(library, "own-names", number, tasks=tasks, seconds=min(seconds, 1.5))

    def contended(self, rounds, seconds):
        for number in range(rounds):
            for library in RUST + self.others:
                longer = 1 if library in RUST else 1.5
                self.run(library, "contended", number, tasks=64, seconds=seconds * longer)

    def processes(self, rounds, _):
        seconds = 1 if self.quick else 3
        for number in range(rounds):
            for library in [OURS] + [name for name in self.others if name == "redisson"]:
                self.four(library, number, seconds)
        for number in range(1 if self.quick else 2):
            for library in ("bare-fred", "rslock", "nadis"):
                self.four(library, number, seconds)

    def waiters(self, rounds, seconds):
        for number in range(rounds):
            for tasks in (10, 100, 1000, 10_000):
                self.run(OURS, "contended", number, tasks=tasks, seconds=seconds)

    def kinds(self, rounds, seconds):
        both = [OURS] + [name for name in self.others if name == "redisson"]
        for number in range(min(rounds, 3)):
            for library in both:
                for kind in KINDS:
                    self.run(f"{library}-{kind}", "pair", number, tasks=1, seconds=min(seconds, 1))
        for number in range(min(rounds, 3)):
            for library in both:
                self.run(library, "mix", number, tasks=64, seconds=seconds)
                # A thousand waiters, in one queue on the server.
                self.run(f"{library}-fair", "contended", number, tasks=1000, seconds=2 * seconds)

    def memory(self, _, __):
        # Once: memory is not noisy, and it takes long to settle.
        for number in range(1):
            for on in ("notify", "lock"):
                self.run(OURS, "waiters", number, waiters=10_000 if self.quick else 100_000, on=on)
            self.run(OURS, "holds", number, called="held", holds=2000 if self.quick else 100_000, seconds=2)

    def growth(self, rounds, _):
        quick = self.quick
        self.second.ask("FLUSHALL")
        self.run(
            OURS, "growth", 0, limit=400, tasks=64, seconds=0.5 if quick else 1, rounds=rounds,
            names=10_000 if quick else 1_000_000, url2=self.second.url,
        )

    def holds(self, _, __):
        self.second.ask("FLUSHALL")
        sizes = [(2000, 11)] if self.quick else [(10_000, 15), (30_000, 15), (100_000, 180)]
        for count, time_of_it in sizes:
            self.run(OURS, "holds", 0, limit=400, holds=count, seconds=time_of_it)

    def four(self, library, number, seconds):
        if library == "redisson":
            tail = ["--", *self.command(library), "worker"]
            command = [self.asked.rust, library]
            self.run(library, "processes", number, command=command, tasks=16, seconds=seconds, tail=tail)
        else:
            self.run(library, "processes", number, tasks=16, seconds=seconds)


class Figures:
    """What the lines say, put together."""

    def __init__(self, results):
        self.results = results

    def lines(self, library, scenario, **fields):
        return [
            line
            for line in self.results
            if line["library"] == library
            and line["scenario"] == scenario
            and all(line.get(key) == value for key, value in fields.items())
        ]

    def values(self, library, scenario, key, **fields):
        return [line[key] for line in self.lines(library, scenario, **fields) if key in line]

    def ratios(self, library, other, scenario, key, **fields):
        theirs = {line["round"]: line for line in self.lines(other, scenario, **fields)}
        return [
            line[key] / theirs[line["round"]][key]
            for line in self.lines(library, scenario, **fields)
            if line["round"] in theirs and theirs[line["round"]].get(key)
        ]

    def best(self, libraries, scenario, key, **fields):
        """The library with the greatest median."""
        medians = {}
        for library in libraries:
            values = self.values(library, scenario, key, **fields)
            if values:
                medians[library] = statistics.median(values)
        return max(medians, key=medians.get) if medians else None


def number(value):
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}"


def spread(values, unit=""):
    """Median, and least and most in brackets."""
    if not values:
        return "–"
    middle = number(statistics.median(values)) + unit
    if len(values) == 1:
        return middle
    return f"{middle} ({number(min(values))}–{number(max(values))})"


def middle(values):
    return statistics.median(values) if values else None


def targets(figures):
    """Rows of the table of targets: id, measure, target, figure, whether it is reached."""
    rows = []

    def row(name, measure, target, values, good, unit="", extra=""):
        reached = "–" if not values else "yes" if good(statistics.median(values)) else "**no**"
        rows.append([name, measure, target, spread(values, unit) + extra, reached])

    f = figures
    own = "own-names"
    row("P1", "acquire + release, one task, free, against the same two scripts through fred", "≤ 1.10 ×",
        f.ratios(OURS, "bare-fred", "pair", "p50_us"), lambda x: x <= 1.10, " ×")
    row("P2", "pairs/s, 256 tasks, own names, against bare fred", "≥ 1.5 ×",
        f.ratios(OURS, "bare-fred", own, "pairs_per_s", tasks=256), lambda x: x >= 1.5, " ×")
    best = f.best(PEERS, own, "pairs_per_s", tasks=256)
    if best:
        row("P2", f"… against the best peer ({best})", "≥ 1.2 ×",
            f.ratios(OURS, best, own, "pairs_per_s", tasks=256), lambda x: x >= 1.2, " ×")
    row("P2", "pairs/s, 16 tasks, against bare fred", "≥ 1.2 ×",
        f.ratios(OURS, "bare-fred", own, "pairs_per_s", tasks=16), lambda x: x >= 1.2, " ×")
    row("P3", "server CPU per pair at 256 tasks, against bare fred", "≤ 0.6 ×",
        f.ratios(OURS, "bare-fred", own, "server_cpu_us_per_pair", tasks=256), lambda x: x <= 0.6, " ×",
        f"; time in scripts {spread(f.ratios(OURS, 'bare-fred', own, 'script_us_per_pair', tasks=256), ' ×')}")
    row("P4", "hand-offs/s, 64 tasks, one name", "≥ 10 000",
        f.values(OURS, "contended", "hand_offs_per_s", tasks=64), lambda x: x >= 10_000)
    best = f.best(PEERS, "contended", "hand_offs_per_s", tasks=64)
    if best:
        row("P4", f"… against the best peer ({best})", "≥ 10 ×",
            f.ratios(OURS, best, "contended", "hand_offs_per_s", tasks=64), lambda x: x >= 10, " ×")
    served = [line["most_served"] / max(line["least_served"], 1) for line in f.lines(OURS, "contended", tasks=64)]
    row("P4", "… most served / least served task", "≤ 1.5", served, lambda x: x <= 1.5)
    row("P4", "… p99 wait over 64 × the mean time per hand-off", "≤ 2",
        f.values(OURS, "contended", "p99_wait_over_fair", tasks=64), lambda x: x <= 2)
    waits = [
        line["wait_p99_ms"] * 1e3 / (64 * line["hand_off_p50_us"]) for line in f.lines(OURS, "contended", tasks=64)
    ]
    row("P4", "… p99 wait over 64 × the median hand-off", "≤ 2", waits, lambda x: x <= 2)
    theirs = f.ratios(OURS, "redisson", "processes", "hand_offs_per_s")
    row("P5", "hand-offs/s, 4 processes × 16 tasks, against Redisson", "≥ 3 ×", theirs, lambda x: x >= 3, " ×")
    row("P5", "… least share of a process, of the hand-offs", "≥ 10 %",
        f.values(OURS, "processes", "least_share_percent"), lambda x: x >= 10, " %")
    calls = [
        line["calls_per_release"] for line in f.lines(OURS, "processes") if "calls_per_release" in line
    ]
    row("P5", "… script calls per real release, without the hand-offs by the server", "≤ 6", calls, lambda x: x <= 6, "",
        f"; of those {spread(f.values(OURS, 'processes', 'by_server_per_release'))}; server CPU "
        f"{spread(f.values(OURS, 'processes', 'server_cpu_percent'), ' %')}")
    holds = f.lines(OURS, "holds")
    most = max((line["holds"] for line in holds), default=0)
    at = dict(holds=most)
    held = f"{number(most)} holds, {number(middle(f.values(OURS, 'holds', 'seconds', **at)))} s"
    row("P6", f"{held}: lost", "0", f.values(OURS, "holds", "lost", **at), lambda x: x == 0)
    row("P6", "… server CPU per renewal", "≤ 2.5 µs",
        f.values(OURS, "holds", "server_cpu_us_per_renewal", **at), lambda x: x <= 2.5, " µs",
        f"; in scripts {spread(f.values(OURS, 'holds', 'script_us_per_renewal', **at), ' µs')}")
    row("P6", "… client, of one core", "≤ 5 %",
        f.values(OURS, "holds", "client_cpu_percent", **at), lambda x: x <= 5, " %")
    p99 = [line["acquire_p99_ms_with"] / line["acquire_p99_ms_without"] for line in f.lines(OURS, "holds", **at)]
    row("P6", "… p99 of other acquires, against without holds", "≤ 2 ×", p99, lambda x: x <= 2, " ×")
    row("P7", "memory per hold besides its name", "≤ 400 B",
        f.values(OURS, "held", "bytes_per_hold"), lambda x: x <= 400, " B")
    lock, notify = (f.values(OURS, "waiters", key) for key in ("bytes_per_waiter", "bytes_per_notified"))
    row("P7", "memory per waiter, above one that waits on a Notify", "≤ 1024 B",
        [a - b for a, b in zip(lock, notify)], lambda x: x <= 1024, " B")
    growth = f.lines(OURS, "growth")
    if growth:
        last = max(growth, key=lambda line: line["names"])
        row("P8", f"server CPU per pair, {number(last['names'])} names seen against 1000", "≤ 1.2 ×",
            [last["ratio"]], lambda x: x <= 1.2, " ×",
            f" ({number(last['ratio_least'])}–{number(last['ratio_most'])})")
    flat = f.values(OURS, "contended", "client_cpu_us_per_hand_off", tasks=10)
    far = f.values(OURS, "contended", "client_cpu_us_per_hand_off", tasks=10_000)
    row("P8", "client CPU per hand-off, 10 000 local waiters against 10", "≤ 1.2 ×",
        [b / a for a, b in zip(flat, far)], lambda x: x <= 1.2, " ×")
    return rows


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in rows])


def columns(figures, libraries, scenario, keys, **fields):
    rows = []
    for library in libraries:
        cells = [spread(figures.values(library, scenario, key, **fields)) for key in keys]
        if any(cell != "–" for cell in cells):
            rows.append([library] + cells)
    return rows


def page(bench, figures):
    f = figures
    cores = os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    rust = subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout.split()
    rust = rust[1] if len(rust) > 1 else "?"
    whole = max(f.lines("", "run"), key=lambda line: line["minutes"])
    minutes, load = whole["minutes"], whole["load"]
    libraries = RUST + [name for name in PEERS if name not in RUST]
    parts = [
        "# Performance",
        "Written by `scripts/bench`, which anybody can run: it starts servers of its own, runs leasehold and its peers in "
        "turn, and writes this page and its plots.",
        f"This run took {minutes:.0f} minutes on {cores} cores ({platform.machine()}, {platform.system()}, "
        f"{memory:.0f} GiB), shared by clients and server, with Redis {bench.server.version()} and Rust {rust}; "
        f"load when it began: {load:.1f}. Ratios are taken within one round and so hold up on a busy machine; absolute "
        "numbers do not.",
        "Each figure is the median of the rounds, with the least and the most in brackets.",
        "## Targets",
        table(["", "measure", "target", "figure", "reached"], targets(f)),
        notes(),
        "## One task, a free lock",
        "Acquire and release, microseconds. `ping-tcp` and `ping-fred` are two `PING`s, on a bare socket and through fred: what "
        "the round trips alone cost.",
        table(["", "median µs", "p99 µs"],
              columns(f, ["ping-tcp", "ping-fred"] + libraries, "pair", ["p50_us", "p99_us"], tasks=1)),
    ]
    for tasks in (16, 256):
        parts += [
            f"## {tasks} tasks, each with names of its own",
            table(
                ["", "pairs/s", "server CPU µs a pair", "in scripts µs a pair", "script calls a pair", "client CPU µs a pair"],
                columns(f, libraries, "own-names", [
                    "pairs_per_s", "server_cpu_us_per_pair", "script_us_per_pair", "script_calls_per_pair",
                    "client_cpu_us_per_pair"], tasks=tasks),
            ),
        ]
    kinds = []
    for kind in KINDS:
        ours, theirs = (f.values(f"{name}-{kind}", "pair", "p50_us") for name in (OURS, "redisson"))
        if ours:
            kinds.append([kind, spread(ours), spread(theirs),
                          spread(f.ratios(f"{OURS}-{kind}", f"redisson-{kind}", "pair", "p50_us"), " ×")])
    crowd = [[name] + [spread(f.values(f"{name}-fair", "contended", key, tasks=1000)) for key in (
        "hand_offs_per_s", "wait_p50_ms", "wait_p99_ms", "most_served", "least_served")] for name in (OURS, "redisson")]
    mixed = [[name] + [spread(f.values(name, "mix", key)) for key in (
        "turns_per_s", "writes_per_s", "read_p99_ms", "write_p99_ms")] for name in (OURS, "redisson")]
    parts += [
        "![Pairs a second over the number of tasks](plots/throughput.svg)",
        "## Other kinds of lock",
        "One task, a free lock: acquire and release, median µs. `multi` takes three names at once.",
        table(["", "leasehold", "Redisson", "ratio"], kinds),
        "One fair lock, 1000 waiters (tasks here, threads there) that come again and again:",
        table(["", "hand-offs/s", "p50 wait ms", "p99 wait ms", "most served", "least served"], crowd),
        "One read/write lock, 64 tasks (or threads) that read nine times of ten:",
        table(["", "turns/s", "of them writes", "p99 wait to read ms", "p99 wait to write ms"], mixed),
        "## 64 tasks, one name",
        "A hand-off counts when the lock really went to another task. Waits that the end of the run cut short count as long "
        "as they had lasted.",
        table(
            ["", "hand-offs/s", "p50 wait ms", "p99 wait ms", "most served", "least served", "starved"],
            columns(f, libraries, "contended", [
                "hand_offs_per_s", "wait_p50_ms", "wait_p99_ms", "most_served", "least_served", "starved"], tasks=64),
        ),
        "![Distribution of the time a hand-off takes](plots/hand-offs.svg)",
        "## Four processes of 16 tasks, one name",
        table(
            ["", "hand-offs/s", "of them between processes", "least share %", "hand-off median µs", "script calls a hand-off",
             "server CPU %", "starved"],
            columns(f, libraries, "processes", [
                "hand_offs_per_s", "between_processes_per_s", "least_share_percent", "hand_off_p50_us",
                "script_calls_per_hand_off", "server_cpu_percent", "starved"]),
        ),
        "## Holds, renewed",
        table(
            ["holds", "lost", "server CPU µs a renewal", "in scripts µs", "client % of a core", "p99 of other acquires ms",
             "without holds ms", "busiest second / mean"],
            [
                [number(line["holds"])] + [number(line.get(key)) for key in (
                    "lost", "server_cpu_us_per_renewal", "script_us_per_renewal", "client_cpu_percent",
                    "acquire_p99_ms_with", "acquire_p99_ms_without", "busiest_second_over_mean")]
                for line in f.lines(OURS, "holds")
            ],
        ),
        "![Cost of a renewal over the number of holds](plots/renewal.svg)",
        "## Growth",
        table(
            ["names seen", "server CPU µs a pair", "with 1000 names", "ratio"],
            [
                [number(line["names"]), number(line["server_cpu_us_per_pair"]),
                 number(line["server_cpu_us_per_pair_1000_names"]),
                 f"{number(line['ratio'])} ({number(line['ratio_least'])}–{number(line['ratio_most'])})"]
                for line in f.lines(OURS, "growth")
            ],
        ),
        table(
            ["local waiters", "hand-offs/s", "client CPU µs a hand-off", "server CPU µs a hand-off"],
            [
                [number(tasks)] + [spread(f.values(OURS, "contended", key, tasks=tasks)) for key in (
                    "hand_offs_per_s", "client_cpu_us_per_hand_off", "server_cpu_us_per_hand_off")]
                for tasks in (10, 100, 1000, 10_000)
            ],
        ),
        "## How it is measured",
        open(f"{HERE}/method.md").read().strip(),
    ]
    if bench.failures:
        parts.append("Runs that failed, and are left out: " + ", ".join(sorted(set(bench.failures))) + ".")
    missing = [name for name in ("redisson", "redsync", "redis-py") if name not in bench.others]
    if missing:
        parts.append("Not there on this machine, and left out: " + ", ".join(missing) + ".")
    return "\n\n".join(part for part in parts if part) + "\n"


def notes():
    """Why a target is not reached, by hand."""
    folder = f"{HERE}/notes"
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return "\n\n".join(open(f"{folder}/{name}").read().strip() for name in names if name.endswith(".md"))


def short(figures):
    """For the README: what matters most, beside the others."""
    f = figures
    rows = []
    for library in RUST + ["redisson", "redsync", "redis-py"]:
        cells = [number(middle(f.values(library, "pair", "p50_us", tasks=1)))]
        cells += [number(middle(f.values(library, "own-names", "pairs_per_s", tasks=256)))]
        cells += [number(middle(f.values(library, "contended", key, tasks=64))) for key in ("hand_offs_per_s", "starved")]
        if any(cell != "–" for cell in cells):
            rows.append([f"**{library}**" if library == OURS else library] + cells)
    head = ["", "one pair, µs", "pairs/s, 256 tasks", "hand-offs/s, 64 tasks on one name", "of them never served"]
    return (table(head, rows) + "\n\n![From release to the next holder, 64 tasks on one name](docs/plots/hand-offs.svg)\n\n"
            "Medians of one run on two cores; how, and with what spread: [docs/performance.md](docs/performance.md).")


def mark(path, text):
    """Puts the text between the markers of the file."""
    begin, end = "<!-- bench -->", "<!-- /bench -->"
    with open(path) as file:
        before, rest = file.read().split(begin, 1)
    with open(path, "w") as file:
        file.write(f"{before}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}")


def draw(figures, folder):
    os.makedirs(folder, exist_ok=True)
    f = figures
    series = []
    for library in RUST:
        points = []
        for tasks in (1, 4, 16, 64, 256):
            values = f.values(library, "own-names", "pairs_per_s", tasks=tasks)
            if values:
                points.append((tasks, statistics.median(values)))
        if points:
            series.append((library, points))
    plots.lines(f"{folder}/throughput.svg", "Pairs a second, each task with its own names", "tasks", "pairs/s", series,
                log_x=True)
    series = []
    shares = [1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 99, 99.9]
    for library in RUST:
        lists = f.values(library, "contended", "hand_off_us", tasks=64)
        if lists:
            medians = [statistics.median(column) for column in zip(*lists)]
            series.append((library, [(max(us, 1), share) for us, share in zip(medians, shares)]))
    plots.lines(f"{folder}/hand-offs.svg", "From release to the next holder, 64 tasks, one name", "µs", "% of hand-offs",
                series, log_x=True)
    lines = f.lines(OURS, "holds")
    series = [
        (label, [(line["holds"], max(line[key], 0)) for line in lines if key in line])
        for label, key in (("server CPU", "server_cpu_us_per_renewal"), ("in scripts", "script_us_per_renewal"))
    ]
    plots.lines(f"{folder}/renewal.svg", "Cost of a renewal on the server", "holds", "µs a renewal", series, log_x=True)


def main():
    parser = argparse.ArgumentParser()
    for name in ("rust", "go", "java", "python", "out", "results"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", help=f"some of {','.join(PARTS)}; the page is written from these and the results there were")
    parser.add_argument("--readme", metavar="FILE", help="rewrite its part between the markers")
    parser.add_argument("--from-results", metavar="FILE", help="write the page from the results of an earlier run")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    load = os.getloadavg()[0]
    bench = Bench(asked)
    if asked.from_results:
        with open(asked.from_results) as file:
            bench.results = [json.loads(line) for line in file]
    else:
        parts = asked.only.split(",") if asked.only else PARTS
        bench.all(parts)
        minutes = (time.monotonic() - bench.began) / 60
        bench.results.append(dict(library="", scenario="run", minutes=minutes, load=load))
        if asked.only and asked.results and os.path.exists(asked.results):
            measured = {(line["library"], line["scenario"], line.get("tasks")) for line in bench.results}
            with open(asked.results) as file:
                before = [json.loads(line) for line in file]
            kept = [line for line in before if (line["library"], line["scenario"], line.get("tasks")) not in measured]
            bench.results = kept + bench.results
    figures = Figures(bench.results)
    os.makedirs(f"{asked.out}/plots", exist_ok=True)
    if asked.results:
        with open(asked.results, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in bench.results)
    with open(f"{asked.out}/performance.md", "w") as file:
        file.write(page(bench, figures))
    draw(figures, f"{asked.out}/plots")
    if asked.readme:
        mark(asked.readme, short(figures))
    print()
    print(table(["", "measure", "target", "figure", "reached"], targets(figures)))
    print(f"\n{asked.out}/performance.md and plots/ written")


main()
