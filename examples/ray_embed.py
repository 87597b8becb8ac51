"""Embeds many texts with Ray Data: a pool of actors on as many machines as the cluster has, each with a compiled model.

    python examples/ray_embed.py                                          # a few texts, two workers on this machine
    python examples/ray_embed.py path/to/checkpoint --texts corpus.txt --workers 64 --out embeddings/

The model is compiled once, here; actors get it by pickle, which is an artefact: they need neither transformers nor
torch, and compile nothing. Ray connects to the cluster that RAY_ADDRESS names, or starts one on this machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

Batch = dict[str, np.ndarray]


class Embedder:
    """An actor: batches of at most `rows` texts in, the same with unit vectors, float32 [batch, width], out.

    model: a compiled embedding for ids and mask, int64 [rows, length], or where Ray keeps it. tokenizer: of the
    tokenizers library, as JSON.
    """

    def __init__(self, model: Any, tokenizer: str, rows: int, length: int) -> None:
        from tokenizers import Tokenizer

        if not callable(model):
            import ray

            model = ray.get(model)
        self.model, self.rows = model, rows
        self.tokenizer = Tokenizer.from_str(tokenizer)
        self.tokenizer.enable_truncation(length)
        self.tokenizer.enable_padding(length=length)  # one shape, so one program
        self.calls = 0

    def __call__(self, batch: Batch) -> Batch:
        texts = [str(text) for text in batch["text"]]
        found = self.tokenizer.encode_batch(texts + [""] * (self.rows - len(texts)))
        ids = np.array([text.ids for text in found], np.int64)
        mask = np.array([text.attention_mask for text in found], np.int64)
        self.calls += 1
        vectors = self.model(ids, mask)[: len(texts)]
        by = np.array([f"{os.uname().nodename}:{os.getpid()}"] * len(texts))
        return {**batch, "embedding": vectors, "by": by, "call": np.full(len(texts), self.calls)}


def embed(dataset: Any, model: Any, tokenizer: str, rows: int, length: int, workers: int) -> Any:
    """`dataset`, whose rows have a "text", with an "embedding" for each."""
    import ray

    return dataset.map_batches(
        Embedder,
        fn_constructor_args=(ray.put(model), tokenizer, rows, length),  # once a machine, not once an actor
        batch_size=rows,
        batch_format="numpy",
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
    )


def compiled(folder: Path | None, pooling: str, rows: int, length: int) -> tuple[Any, str]:
    """The model for an actor, which has one CPU, and its tokenizer."""
    import torch
    from embed import Embedding, load

    import forge_ugc

    tokenizer, encoder, random = load(folder, rerank=False)
    if random:
        print("[random weights: pass a checkpoint's folder for embeddings that mean something]")
    ids = torch.ones(rows, length, dtype=torch.int64)
    fast = forge_ugc.compile(Embedding(encoder, pooling).eval(), (ids, ids), num_threads=1)
    print(f"[compiled for {fast.device}; fallbacks: {fast.report['fallbacks'] or 'none'}]")
    return fast, tokenizer.backend_tokenizer.to_str()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="a checkpoint's folder")
    parser.add_argument("--pooling", choices=["mean", "cls"], default="mean", help="(default: mean)")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="a text a line")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="actors, a CPU each (default: 2)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="texts in a call (default: 32)")
    parser.add_argument("--length", type=int, default=128, metavar="N", help="tokens of a text (default: 128)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write Parquet files there")
    args = parser.parse_args(arguments)

    import ray
    from embed import TEXTS

    texts = [f"{text} ({i})" for i in range(40) for text in TEXTS]
    if args.texts:
        texts = args.texts.read_text().splitlines()
    model, tokenizer = compiled(args.model, args.pooling, args.batch, args.length)
    ray.init(num_cpus=None if os.environ.get("RAY_ADDRESS") else args.workers, include_dashboard=False)
    try:
        rows = ray.data.from_items([{"text": text} for text in texts], override_num_blocks=4 * args.workers)
        done = embed(rows, model, tokenizer, args.batch, args.length, args.workers)
        if args.out:
            done.drop_columns(["by", "call"]).write_parquet(str(args.out))
            print(f"[{len(texts)} texts; written to {args.out}]")
        else:
            found = done.take_all()
            actors = {row["by"] for row in found}
            print(f"[{len(found)} texts, {len(found[0]['embedding'])} numbers each; by {len(actors)} actors]")
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
