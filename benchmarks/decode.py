"""Decode: tokens a second beside eager, OpenVINO and llama.cpp, and their share of the memory's bandwidth.

examples:
  python -m benchmarks.decode --llama PYTHON --budget 10      all models; PYTHON has llama-cpp-python
  python -m benchmarks.decode --models gpt2 --precisions fp32 --systems eager,forge
  python -m benchmarks.decode --quick --systems eager,forge   two layers and few steps: does it work?

Batch 1, random weights, greedy, after a prompt of 32 tokens, with all logits of the new token. eager and Forge run
transformers' model over a StaticCache in a plain loop, Forge a step that forge_ugc.compile has compiled; OpenVINO runs
the stateful model that transformers' exporter makes (w8: int8 weights with a scale a channel, by nncf), as it comes,
which rounds the activations of quantised weights to int8, and as openvino-f32, which like Forge does not; llama.cpp
runs a GGUF of the same shape (fp32: F32, w8: Q8_0, groups of 32). Systems have processes of their own and make their
steps in turn, while the others wait. The probe reads memory between them with as many threads: a share is bytes of the
weights that a token reads, by the time of a step, by the probe's rate. A system that fails, or for which there is not
enough memory, has the reason in its row.

To build llama.cpp for this machine: CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" pip install llama-cpp-python gguf
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import math
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from . import machine
from .decode_gguf import SHAPES, tensors

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "benchmarks" / "decode"
PATIENCE = 900  # seconds for an answer
SYSTEMS = ("forge", "eager", "openvino", "openvino-f32", "llama.cpp")
LABELS = {"gpt2": "GPT-2", "qwen2": "Qwen2-0.5B", "llama1b": "Llama-3.2-1B"}
# GB of memory that a system takes for each GB of its weights, while it gets ready
APPETITE = {"forge": 1.2, "eager": 1.2, "openvino": 2.4, "openvino-f32": 2.4, "llama.cpp": 1.1}
# of weights; activations. Bytes of a weight, its scales included
FORMATS = {
    ("forge", "fp32"): ("f32", 4.0),
    ("eager", "fp32"): ("f32", 4.0),
    ("openvino", "fp32"): ("f32", 4.0),
    ("llama.cpp", "fp32"): ("F32", 4.0),
    ("forge", "w8"): ("int8, a scale a channel; f32", 1.0),
    ("openvino", "w8"): ("int8, a scale a channel; int8", 1.0),
    ("openvino-f32", "w8"): ("int8, a scale a channel; f32", 1.0),
    ("llama.cpp", "w8"): ("Q8_0: int8, groups of 32; int8", 34 / 32),
    ("forge", "w4"): ("int4, groups of 128; f32", 0.5 + 4 / 128),
    ("openvino", "w4"): ("int4, groups of 128; int8", 0.5 + 2 / 128),
    ("openvino-f32", "w4"): ("int4, groups of 128; f32", 0.5 + 2 / 128),
    ("llama.cpp", "w4"): ("Q4_0: int4, groups of 32; int8", 18 / 32),
    ("forge", "bf16"): ("bf16", 2.0),
    ("llama.cpp", "bf16"): ("BF16", 2.0),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt2,qwen2,llama1b", help=f"of {', '.join(SHAPES)}; default all")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}; default all")
    parser.add_argument("--precisions", default="fp32,w8,w4", help="of fp32, w8, w4, bf16 (default fp32,w8,w4)")
    parser.add_argument("--llama", metavar="PYTHON", default=sys.executable, help="the Python that has llama_cpp")
    parser.add_argument("--layers", type=int, help="only the first layers; default all")
    parser.add_argument("--turns", type=int, default=6, help="turns of steps (default 6)")
    parser.add_argument("--steps", type=int, default=12, help="steps in a turn (default 12)")
    parser.add_argument("--length", type=int, default=256, help="entries of the cache (default 256)")
    parser.add_argument("--threads", type=int, default=machine.cores(), help="of every system (default: all cores)")
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="leave out what would take longer, and say so")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of files for OpenVINO and llama.cpp; they stay")
    parser.add_argument("--prepare", action="store_true", help="only make these files")
    parser.add_argument("--quick", action="store_true", help="two layers, few steps: a test of the benchmark")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for decode.md, .json")
    args = parser.parse_args(arguments)
    for name in ("models", "systems", "precisions"):
        setattr(args, name, [n for n in getattr(args, name).split(",") if n])
    for model in args.models:
        if model not in SHAPES:
            parser.error(f"no model {model!r}; there are {', '.join(SHAPES)}")
    for system in args.systems:
        if system not in SYSTEMS:
            parser.error(f"no system {system!r}; there are {', '.join(SYSTEMS)}")
    if args.quick:
        args.layers, args.turns, args.steps = args.layers or 2, min(args.turns, 2), min(args.steps, 4)
    if args.turns * args.steps + 3 + 32 > args.length:
        parser.error("--length: the cache has no room for so many steps")
    return args


# --- the probe --------------------------------------------------------------------------------------------------------
class Probe:
    """GB/s of reading memory with all threads at once: the fastest of several numbers of streams."""

    STREAMS = (1, 2, 4, 8)

    def __init__(self, threads: int, megabytes: int = 96) -> None:
        compiler = next(c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c))
        self.folder = tempfile.TemporaryDirectory()
        library = Path(self.folder.name) / "probe.so"
        _, width, options = next((n, w, o) for n, needs, w, o in machine.WIDTHS if set(needs) <= machine.cpuinfo()[1])
        subprocess.run(
            [compiler, "-O3", f"-DBYTES={width}", *options, "-shared", "-fPIC", str(machine.PROBE), "-o", str(library)],
            check=True,
        )
        self.read = ctypes.CDLL(str(library)).read_streams
        self.read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.read.restype = ctypes.c_float
        self.floats = megabytes << 18
        self.data = [np.ones(self.floats, dtype=np.float32) for _ in range(threads)]

    def rate(self, streams: int, seconds: float = 0.06) -> float:
        """All threads read until the time is over."""
        end = time.perf_counter() + seconds
        done = [0] * len(self.data)

        def run(number: int) -> None:
            while time.perf_counter() < end:
                self.read(self.data[number].ctypes.data, self.floats, streams)
                done[number] += 1

        threads = [threading.Thread(target=run, args=(n,)) for n in range(1, len(self.data))]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        run(0)
        took = time.perf_counter() - start
        for thread in threads:
            thread.join()
        return sum(done) * self.floats * 4e-9 / max(took, time.perf_counter() - start)

    def best(self) -> float:
        return max(self.rate(streams) for streams in self.STREAMS)


# --- processes --------------------------------------------------------------------------------------------------------
class Process:
    """A worker; `ask` sends a command and waits for the answer."""

    def __init__(self, python: str, settings: dict[str, Any]) -> None:
        quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.decode_worker", json.dumps(settings)],
            cwd=ROOT,
            env={**os.environ, **quiet, "OMP_NUM_THREADS": str(settings["threads"])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.tail: deque[str] = deque(maxlen=40)
        self.answers: queue.Queue[str] = queue.Queue()
        self.readers = [threading.Thread(target=read, daemon=True) for read in (self._answers, self._errors)]
        for reader in self.readers:
            reader.start()

    def _answers(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def _errors(self) -> None:
        assert self.process.stderr is not None
        self.tail.extend(line.rstrip() for line in self.process.stderr)

    def ask(self, seconds: float = PATIENCE, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            self.process.kill()
            return {"error": f"no answer within {seconds:g} s"}
        except OSError:  # it is gone
            answer = ""
        if not answer:
            self.process.wait()
            self.readers[1].join(5)
            said = self.tail[-1] if self.tail else f"exit status {self.process.returncode}"
            return {"error": f"its process ended: {said}"}
        found: dict[str, Any] = json.loads(answer)
        return found

    def end(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Row:
    model: str
    system: str
    precision: str
    error: str = ""
    ready_s: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def bytes(self, layers: int | None) -> float:
        """Of the weights that a token reads: all matrices, the head among them."""
        shape = SHAPES[self.model]
        sizes = tensors(shape, layers or shape.layers)
        sizes.pop("output.weight", None)  # GPT-2's: the embedding again
        sizes.pop("position_embd.weight", None)
        _, size = FORMATS[self.system, self.precision]
        return sum(float(np.prod(s)) * (size if len(s) > 1 else 4.0) for s in sizes.values())


def lack_of_memory(row: Row, layers: int | None) -> str:
    """Why the row's system would better not be started, or ""."""
    weights = Row(row.model, row.system, "fp32" if row_kind(row) == "torch" else row.precision).bytes(layers)
    needed, free = weights * APPETITE[row.system] / 2**30, machine.available_gb()
    return f"it would take {needed:.1f} GiB, {free:.1f} are free" if needed > free else ""


def prepare(args: argparse.Namespace, rows: list[Row], settings: dict[str, Any], deadline: float) -> None:
    """Makes the files that systems run, each in a process that ends with its memory."""
    for row in rows:
        if row.system in ("openvino", "openvino-f32", "llama.cpp"):
            elsewhere = row.system == "llama.cpp" and importlib.util.find_spec("gguf") is None
            process = Process(args.llama if elsewhere else sys.executable, settings)
            seconds = min(PATIENCE, deadline - time.monotonic())
            command = dict(do="prepare", system=row.system, precision=row.precision)
            row.error = process.ask(max(seconds, 60), **command).get("error", "")
            process.end()
    os.sync()


def measure(
    args: argparse.Namespace, model: str, precision: str, probe: Probe, rates: list[float], deadline: float
) -> list[Row]:
    """One group: the systems at a precision, in turn. Ends soon after `deadline`, with what has been measured."""
    rows = [Row(model, s, precision) for s in args.systems if (s, precision) in FORMATS]
    settings = dict(model=model, layers=args.layers, threads=args.threads, length=args.length, folder=str(args.folder))
    prepare(args, rows, settings, deadline)
    if args.prepare:
        return rows
    shared: dict[str, Process] = {}  # eager and Forge share the model
    running: list[tuple[Row, Process]] = []

    def ask(row: Row, do: str, **more: Any) -> dict[str, Any]:
        """The answer; an error is the row's."""
        seconds = min(PATIENCE, deadline - time.monotonic())
        answer = shared[row_kind(row)].ask(max(seconds, 60), do=do, system=row.system, precision=precision, **more)
        row.error = answer.get("error", "")
        return answer

    try:
        for row in [r for r in rows if not r.error]:
            kind = row_kind(row)
            row.error = "" if kind in shared else lack_of_memory(row, args.layers)
            if row.error:
                continue
            if kind not in shared:
                shared[kind] = Process(args.llama if row.system == "llama.cpp" else sys.executable, settings)
            answer = ask(row, "start")
            if not row.error:
                row.ready_s, row.tokens = answer["ready_s"], answer["tokens"]
                running.append((row, shared[kind]))
        for turn in range(args.turns):
            first = turn % max(len(running), 1)
            for row, _ in running[first:] + running[:first]:
                if row.error or time.monotonic() > deadline:
                    continue
                rates.append(probe.best())
                answer = ask(row, "steps", count=args.steps)
                if not row.error:
                    row.times += answer["times"]
                    row.tokens += answer["tokens"]
    finally:
        for process in shared.values():
            process.end()
    return rows


def row_kind(row: Row) -> str:
    """Rows of one kind share a process."""
    return "torch" if row.system in ("forge", "eager") else row.system


# --- the page ---------------------------------------------------------------------------------------------------------
def same_tokens(rows: list[Row]) -> str:
    """Whether Forge and eager chose the same in fp32."""
    tokens = {r.system: r.tokens for r in rows if r.precision == "fp32" and r.times and r.system in ("forge", "eager")}
    if len(tokens) < 2:
        return ""
    pairs = list(zip(tokens["forge"], tokens["eager"], strict=False))
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def page(args: argparse.Namespace, info: dict[str, Any], rows: list[Row], rate: float, left_out: list[str]) -> str:
    lines = [
        "# Decode: tokens a second",
        "",
        f"`python -m benchmarks.decode`, {info['date']}: {info['cpu']}, {args.threads} threads, "
        + ", ".join(f"{k} {v}" for k, v in info["packages"].items() if k in ("torch", "transformers", "openvino"))
        + ".",
        f"The probe read {rate:.1f} GB/s (median over the run of the best of {', '.join(map(str, Probe.STREAMS))} "
        "streams a thread). Batch 1, greedy, random weights, "
        + ("full depth" if not args.layers else f"{args.layers} layers")
        + f", cache of {args.length} entries; medians of {args.turns} turns of {args.steps} steps.",
        "",
        "| model | precision | system | weights; activations | tokens/s | ms a token | bandwidth | ready after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {LABELS[row.model]} | {row.precision} | {row.system} | {FORMATS[row.system, row.precision][0]} |"
        if row.error or not row.times:
            lines.append(f"{start} - | - | - | {row.error or 'no steps'} |")
            continue
        median = statistics.median(row.times)
        share = row.bytes(args.layers) / median * 1e-9 / rate
        lines.append(f"{start} {1 / median:.1f} | {median * 1e3:.2f} | {share:.0%} | {row.ready_s:.1f} s |")
    lines.append("")
    for model in dict.fromkeys(r.model for r in rows):
        same = same_tokens([r for r in rows if r.model == model])
        if same:
            lines.append(f"{LABELS[model]}: {same} tokens of Forge in fp32 are eager's.")
    lines += [f"Left out for want of time: {text}." for text in left_out]
    lines += [
        "",
        "Bytes are those of the matrices that a token reads, in the system's own format; the cache and the activations "
        "are not counted. eager and Forge have a static cache and a mask, llama.cpp a cache as long, in f32 beside F32 "
        "weights and in f16 beside others, OpenVINO one that grows. Ready after: from the model in memory "
        "(OpenVINO, llama.cpp: from its file, made before) until the prompt and three tokens are done.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    console = Console(stderr=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    info = machine.describe()
    probe, rates, rows, left_out = Probe(args.threads), [], [], []
    start, pace = time.monotonic(), 0.0  # pace: seconds a GB of weights
    deadline = start + 60 * args.budget if args.budget else math.inf
    rates = [probe.best() for _ in range(5)]
    # the main figures first: each model in fp32 and w8, then the rest
    order = [(m, p) for p in args.precisions for m in args.models]
    for model, precision in order:
        size = Row(model, "eager", "fp32").bytes(args.layers) * 1e-9
        begin = time.monotonic()
        if begin + pace * size > deadline:
            left_out.append(f"{LABELS[model]} in {precision}")
            continue
        found = measure(args, model, precision, probe, rates, deadline)
        pace = max(0.6 * pace, (time.monotonic() - begin) / size)
        rows += found
        for row in found:
            speed = f"{1 / statistics.median(row.times):.1f} tokens/s" if row.times else row.error or "ready"
            console.print(f"{LABELS[row.model]} {row.precision} {row.system}: {speed}", markup=False, soft_wrap=True)
        if args.prepare:
            continue
        rows.sort(key=lambda r: (args.models.index(r.model), args.precisions.index(r.precision)))
        rate = statistics.median(rates)
        kept = {"machine": info, "read_gbytes": rate, "rows": [vars(r) for r in rows], "left_out": left_out}
        (args.out / "decode.json").write_text(json.dumps(kept, indent=1) + "\n")
        (args.out / "decode.md").write_text(page(args, info, rows, rate, left_out))
    if args.prepare:
        return 0 if not any(r.error for r in rows) else 1
    (args.out / "decode.md").write_text(page(args, info, rows, statistics.median(rates), left_out))
    return 0 if any(r.times for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
