"""Speech to text with Whisper: the encoder and each step of the decoder through Forge.

    python examples/transcribe.py                                   # a small Whisper of random weights, a chirp
    python examples/transcribe.py path/to/checkpoint speech.wav --compare

The checkpoint is a local folder that transformers loads, with its feature extractor and tokenizer; the sound is a WAV
file of 16-bit samples at the checkpoint's rate (16 kHz), of at most 30 s. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import wave
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers

import forge_ugc
from forge_ugc.integrations.transformers import compile_config


def random_model() -> Any:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=200, num_mel_bins=80, max_source_positions=100,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model


def chirp(rate: int, seconds: float) -> np.ndarray:
    """A tone that rises from 200 Hz."""
    t = np.arange(int(rate * seconds)) / rate
    return np.sin(2 * np.pi * (200 * t + 400 * t * t)).astype(np.float32)


def samples(path: Path, rate: int) -> np.ndarray:
    """The first channel of a WAV file, in [-1, 1]."""
    with wave.open(str(path)) as file:
        if file.getsampwidth() != 2 or file.getframerate() != rate:
            raise SystemExit(f"{path}: expected 16-bit samples at {rate} Hz")
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return data[:: file.getnchannels()].astype(np.float32) / 32768


def forge_calls() -> int:
    """Calls of Forge until now; RuntimeError if torch ran any of what it was asked to."""
    for graph in forge_ugc.last_reports():
        if graph.fallback or graph.eager_calls or any(r["fallbacks"] for r in graph.reports):
            raise RuntimeError(f"not all of it ran through Forge: {graph}")
    return sum(graph.calls for graph in forge_ugc.last_reports())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="a checkpoint's folder")
    parser.add_argument("sound", nargs="?", type=Path, help="a WAV file")
    parser.add_argument("--tokens", type=int, default=40, metavar="N", help="write at most N tokens (default: 40)")
    parser.add_argument("--compare", action="store_true", help="let eager write too")
    args = parser.parse_args(arguments)
    if args.model is not None and not args.model.is_dir():
        parser.error(f"{args.model} is no folder")
    transformers.utils.logging.set_verbosity_error()
    if args.model is None:
        print("[random weights: pass a checkpoint's folder for words that mean something]")
        model, tokenizer = random_model(), None
        extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=2)
    else:
        kind = transformers.WhisperForConditionalGeneration
        model = kind.from_pretrained(args.model, local_files_only=True).float()
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        extractor = transformers.AutoFeatureExtractor.from_pretrained(args.model, local_files_only=True)
    model.eval()
    rate = extractor.sampling_rate
    sound = samples(args.sound, rate) if args.sound else chirp(rate, 1.5)
    features = extractor(sound, sampling_rate=rate, return_tensors="pt")["input_features"]

    def write(**how: Any) -> torch.Tensor:
        # the cache of the decoder has a fixed size, so that each step has the same shapes
        return model.generate(
            features, do_sample=False, max_new_tokens=args.tokens, cache_implementation="static", **how
        )

    expected = write(disable_compile=True) if args.compare else None
    before = forge_calls()
    model.model.encoder.compile(backend="forge")
    tokens = write(compile_config=compile_config())
    print(tokenizer.decode(tokens[0], skip_special_tokens=True).strip() if tokenizer else tokens[0].tolist())
    print(f"[{tokens.shape[1]} tokens; {forge_calls() - before} calls of Forge; fallbacks: none]")
    if expected is None:
        return 0
    same = torch.equal(tokens, expected)
    print("[the same tokens as eager]" if same else "[other tokens than eager: two were about as likely]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
