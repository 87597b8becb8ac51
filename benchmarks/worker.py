"""A process that hosts systems: it imports, builds the model, compiles with the clock running, and then makes calls
when it is told to. One line of JSON a command on stdin, one a reply on stdout; everything else goes to stderr.

    python -m benchmarks.worker '{"subject": {"model": "gpt2"}, "systems": ["forge", "eager"], "threads": 2, ...}'
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from .energy import Rapl
from .measure import PeakMemory, end_with_parent, resident_bytes, timed
from .models import Subject, build, inputs, vocabulary_of
from .systems import Built, Call, system


class Worker:
    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        self.job = job
        self.threads = job["threads"]
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(False)
        self.subject = Subject(**job["subject"])
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(job["scratch"], f"inductor_{os.getpid()}")  # an empty one
        self.systems = {text: system(text) for text in job["systems"]}
        for each in self.systems.values():
            each.prepare()
        self.model: Any
        self.model, self.args = build(self.subject)
        self.vocabulary = vocabulary_of(self.model)
        self.weights = sum(p.nbytes for p in {p.data_ptr(): p for p in self.model.parameters()}.values())
        self.shared: dict[str, Any] = {"scratch": job["scratch"]}
        self.built: dict[str, Built] = {}
        self.calls: dict[str, Call] = {}
        self.rapl = Rapl()

    def compile(self, name: str) -> dict[str, Any]:
        gc.collect()
        peak = PeakMemory()
        before = resident_bytes()
        peak.start()
        built = self.systems[name].build(self.model, self.args, self.threads, self.shared)
        call = built.bind(self.args)
        compiled_peak = peak.above()
        first_s, _ = timed(call)
        peak_bytes = max(compiled_peak, peak.above()) if built.lazy else compiled_peak
        facts = dict(built.facts)
        if built.lazy:  # its first call is the compilation and one call
            usual = sorted(timed(call)[0] for _ in range(3))[1]
            built.phases["first call"] = (first_s - usual) * 1e3
            first_s = usual
        gc.collect()
        self.built[name], self.calls[name] = built, call
        return {
            "phases": built.phases,
            "compile_s": sum(built.phases.values()) / 1e3,
            "first_s": first_s,
            "peak_bytes": peak_bytes,
            "added_bytes": max(0, resident_bytes() - before),
            "weight_bytes": self.weights,
            "facts": facts,
        }

    def drop_model(self) -> dict[str, Any]:
        """Where no system of this process reads torch's weights, they go."""
        if all(not built.keeps_model for built in self.built.values()):
            self.model = None
            self.shared.clear()
            gc.collect()
        return {"resident_bytes": resident_bytes()}

    def run(self, name: str, count: int, warm: int) -> dict[str, Any]:
        call = self.calls[name]
        for _ in range(warm):
            call()
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            result = call()
            seconds.append(round(time.perf_counter() - start, 7))
            del result  # its memory is given back between the clocks
        return {"seconds": seconds}

    def energy(self, name: str, seconds: float) -> dict[str, Any]:
        """Joules a call of the packages' counters, over calls of `seconds` in all."""
        if self.rapl.reason:
            return {"joules": None, "reason": self.rapl.reason}
        call = self.calls[name]
        call()
        before, start, count = self.rapl.read(), time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            call()
            count += 1
        return {"joules": self.rapl.joules(before, self.rapl.read()) / count, "calls": count}

    def outputs(self, name: str, seed: int, path: str) -> dict[str, Any]:
        """Saves what the system gives for the inputs of `seed`."""
        import numpy as np

        result = self.built[name].bind(inputs(self.subject, self.vocabulary, seed))()
        np.save(path, np.asarray(result))
        return {"path": path}

    def exact(self, names: list[str]) -> dict[str, Any]:
        """The largest distance of each system's outputs to a float64 run of the model."""
        from tests.compare import float64_run, max_abs

        exact = float64_run(self.model, *self.args)
        return {"to_float64": {name: max_abs(self.built[name].bind(self.args)(), exact) for name in names}}

    def flops(self) -> dict[str, Any]:
        """Multiply-adds of eager's products with weights, times two. Attention's own products are left out: half of a
        causal one need not be done, and systems differ in whether they do it."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            self.model(*self.args)
        counts = {str(op).split(".")[-1]: n for op, n in counter.get_flop_counts()["Global"].items()}
        return {"flops": sum(n for name, n in counts.items() if name in ("mm", "addmm", "convolution"))}

    def tokens(self, seed: int) -> dict[str, Any]:
        return {"ids": inputs(self.subject, self.vocabulary, seed)[0].tolist()}


def give_way() -> None:
    """Where memory runs out, the kernel takes this process and not those that it is compared with."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    end_with_parent()
    job = json.loads(sys.argv[1])
    if not {"forge", "eager"} & {name.partition(":")[0] for name in job["systems"]}:
        give_way()
    worker = Worker(job)
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            reply = getattr(worker, do)(**command)
        except Exception as error:
            import traceback

            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
