"""Loading what was saved: an artefact of Forge, and OpenVINO's model as xml, each time in a fresh process, in turn.

python -m benchmarks.artefact forge m.forge 2 9        one process: seconds to load, of the first call, of 9 more
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from .measure import end_with_parent
from .models import Subject, build

ROOT = Path(__file__).parent.parent
SYSTEMS = ("forge", "openvino")


def artefact(subject: Subject, threads: int, rounds: int, calls: int) -> dict[str, Any]:
    """{system: {"load_s", "first_s": one a round, "call_s": rounds of calls}, "bytes": of the files, "max_abs"}."""
    with tempfile.TemporaryDirectory(prefix="forge_bench_") as folder:
        size = _save(subject, threads, Path(folder))
        found: dict[str, Any] = {name: {"load_s": [], "first_s": [], "call_s": []} for name in size}
        outputs = {}
        for number in range(rounds + 1):  # the first brings the files into memory, and is not counted
            for name in size:
                output = Path(folder) / f"{name}.npy"
                command = [sys.executable, "-m", "benchmarks.artefact", name, folder, str(threads), str(calls)]
                done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=600)
                outputs[name] = np.load(output)
                for key, value in json.loads(done.stdout.splitlines()[-1]).items():
                    if number:
                        found[name][key].append(value)
        distance = max(float(np.abs(outputs["forge"] - other).max()) for other in outputs.values())
    return {**found, "bytes": size, "max_abs": distance}


def _save(subject: Subject, threads: int, folder: Path) -> dict[str, int]:
    """Writes the model both ways, and its inputs; OpenVINO's where it is installed."""
    import torch

    import forge_ugc

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model, args = build(subject)
    for number, arg in enumerate(args):
        np.save(folder / f"input{number}.npy", arg.numpy())
    forge_ugc.compile(model, args, device="cpu", num_threads=threads, pack=False, progress=False).save(folder / "forge")
    size = {"forge": (folder / "forge").stat().st_size}
    try:
        import openvino
    except ImportError:
        return size
    converted = openvino.convert_model(torch.export.export(model, args, strict=False))
    openvino.save_model(converted, folder / "openvino.xml", compress_to_fp16=False)
    size["openvino"] = sum((folder / f"openvino.{end}").stat().st_size for end in ("xml", "bin"))
    return size


def load(name: str, folder: Path, threads: int, calls: int) -> dict[str, Any]:
    """In this process, with imports done: until the model can be called, its first call, and `calls` more."""
    args = [np.load(path) for path in sorted(folder.glob("input*.npy"))]
    if name == "forge":
        import forge_ugc

        start = time.perf_counter()
        model = forge_ugc.load(folder / "forge", device="cpu", num_threads=threads)

        def call() -> Any:
            return model(*args)
    else:
        import openvino

        core = openvino.Core()
        core.available_devices  # noqa: B018  # finds its plugins
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        start = time.perf_counter()
        compiled = core.compile_model(folder / "openvino.xml", "CPU", settings)

        def call() -> Any:
            return compiled(args, share_inputs=True, share_outputs=True)[0]

    ready = time.perf_counter()
    seconds = []
    for _ in range(calls + 1):
        start_call = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start_call)
    np.save(folder / f"{name}.npy", result)
    return {"load_s": ready - start, "first_s": seconds[0], "call_s": seconds[1:]}


def main() -> None:
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, folder, threads, calls = sys.argv[1:]
    print(json.dumps(load(name, Path(folder), int(threads), int(calls))), file=replies)


if __name__ == "__main__":
    main()
