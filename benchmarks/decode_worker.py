"""One process of the decode benchmark: holds systems that decode, and makes steps when told to.

Started by benchmarks.decode. Reads commands as lines of JSON on stdin, answers a line each on stdout:
{"do": "start", "system": ..., "precision": ...}, {"do": "steps", "system": ..., "precision": ..., "count": n}.
llama.cpp's Python may be another one, so only what a system needs is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = 32  # tokens before the first step
LLAMA_FORMATS = {"fp32": "F32", "w8": "Q8_0", "w4": "Q4_0", "bf16": "BF16", "fp16": "F16"}


def prompt_of(vocabulary: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, vocabulary, PROMPT)


# --- torch: eager and Forge, over one model ---------------------------------------------------------------------------
class TorchModel:
    """The model, made once for all that run in this process."""

    def __init__(self, name: str, layers: int | None, threads: int) -> None:
        import torch

        from tests.models import families

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.model = families.build(name, layers).m
        self.weights = sum(p.numel() for p in self.model.parameters())


class TorchDecoder:
    """transformers' StaticCache and a plain loop: the model as it is, or what forge_ugc.compile makes of a step."""

    def __init__(self, shared: TorchModel, system: str, precision: str, length: int, threads: int) -> None:
        import torch
        import transformers

        self.torch, model = torch, shared.model
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        self.step: Any = model
        prompt = torch.from_numpy(prompt_of(model.config.vocab_size))[None]
        with torch.no_grad():
            self.token = self._next(model, prompt)
            if system == "forge":
                import forge_ugc

                inputs = dict(input_ids=self.token, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
                options = dict(device="cpu", num_threads=threads, precision=precision, strict=True)
                self.step = forge_ugc.compile(model, (), inputs, **options)

    def _next(self, run: Any, tokens: Any) -> Any:
        logits = run(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)

    def steps(self, count: int) -> tuple[list[float], list[int]]:
        times, tokens = [], []
        with self.torch.no_grad():
            for _ in range(count):
                start = time.perf_counter()
                self.token = self._next(self.step, self.token)
                tokens.append(int(self.token))
                times.append(time.perf_counter() - start)
        return times, tokens


# --- OpenVINO: the stateful model that transformers' exporter makes ---------------------------------------------------
class OpenvinoDecoder:
    def __init__(
        self, name: str, layers: int | None, precision: str, threads: int, folder: Path, rounds: bool = False
    ) -> None:
        """`rounds`: activations to int8, before products with quantised weights."""
        import openvino as ov

        path = self.prepare(name, layers, precision, folder)
        config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        config["KV_CACHE_PRECISION"] = "f32"
        if not rounds:
            config["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        self.compiled = ov.Core().compile_model(path, "CPU", config)
        self.request = self.compiled.create_infer_request()
        self.inputs = {i.get_any_name() for i in self.compiled.inputs}
        self.at = 0
        self.token = self._next(prompt_of(self.compiled.outputs[0].get_partial_shape()[2].get_length()))

    @staticmethod
    def prepare(name: str, layers: int | None, precision: str, folder: Path) -> Path:
        """Exports the model, if its file is not there."""
        path = folder / f"{name}-{layers or 'all'}-{precision}.xml"
        if path.exists():
            return path
        import openvino as ov
        import torch
        from transformers.exporters.exporter_openvino import OpenVINOConfig, OpenVINOExporter

        torch.manual_seed(0)
        if precision == "fp32":
            from tests.models import families

            ids = torch.from_numpy(prompt_of(50))[None]
            exported = OpenVINOExporter().export_for_generation(
                families.build(name, layers).m,
                dict(input_ids=ids, attention_mask=torch.ones_like(ids)),
                config=OpenVINOConfig(dynamic=True, stateful=True),
                multi_token_decode=True,
            )
            model: Any = exported.components["decode"].program
        else:
            import nncf

            model = ov.Core().read_model(OpenvinoDecoder.prepare(name, layers, "fp32", folder))
            modes = {"w8": nncf.CompressWeightsMode.INT8_SYM, "w4": nncf.CompressWeightsMode.INT4_SYM}
            four = dict(ratio=1.0, group_size=128, all_layers=True) if precision == "w4" else {}
            model = nncf.compress_weights(model, mode=modes[precision], **four)
        ov.save_model(model, path.with_suffix(".part.xml"), compress_to_fp16=False)
        path.with_suffix(".part.bin").rename(path.with_suffix(".bin"))
        path.with_suffix(".part.xml").rename(path)
        return path

    def _next(self, tokens: np.ndarray[Any, Any]) -> int:
        count = len(tokens)
        given = {
            "input_ids": tokens.reshape(1, count),
            "position_ids": np.arange(self.at, self.at + count).reshape(1, count),
            "attention_mask": np.ones((1, self.at + count), dtype=np.int64),
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        self.request.infer({k: v for k, v in given.items() if k in self.inputs}, share_inputs=True)
        self.at += count
        return int(self.request.get_output_tensor(0).data[0, -1].argmax())

    def steps(self, count: int) -> tuple[list[float], list[int]]:
        times, tokens = [], []
        for _ in range(count):
            start = time.perf_counter()
            self.token = self._next(np.array([self.token]))
            times.append(time.perf_counter() - start)
            tokens.append(self.token)
        return times, tokens


# --- llama.cpp: its own graph of the same architecture, random weights ------------------------------------------------
class LlamaDecoder:
    def __init__(self, path: Path, threads: int, length: int, vocabulary: int) -> None:
        import ctypes

        import llama_cpp

        self.c, self.vocabulary = llama_cpp, vocabulary
        llama_cpp.llama_backend_init()
        silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        self.keep = silent
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path.name}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = length, PROMPT
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32 if "F32" in path.name else llama_cpp.GGML_TYPE_F16
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp makes no context")
        self.batch = llama_cpp.llama_batch_init(PROMPT, 0, 1)
        self.at = 0
        self.token = self._next(prompt_of(vocabulary))

    def _next(self, tokens: Any) -> int:
        batch, count = self.batch, len(tokens)
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = int(token), self.at + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == count - 1
        if self.c.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self.at += count
        logits = self.c.llama_get_logits_ith(self.context, count - 1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocabulary,)).argmax())

    def steps(self, count: int) -> tuple[list[float], list[int]]:
        times, tokens = [], []
        for _ in range(count):
            start = time.perf_counter()
            self.token = self._next([self.token])
            times.append(time.perf_counter() - start)
            tokens.append(self.token)
        return times, tokens


# --- the process ------------------------------------------------------------------------------------------------------
class Worker:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.shared: TorchModel | None = None
        self.decoders: dict[tuple[str, str], Any] = {}

    def prepare(self, system: str, precision: str) -> dict[str, Any]:
        """Makes the file that the system runs, in a process that ends with its memory."""
        s = self.settings
        if system.startswith("openvino"):
            OpenvinoDecoder.prepare(s["model"], s["layers"], precision, Path(s["folder"]))
        elif system == "llama.cpp":
            self._gguf(precision)
        return {}

    def _gguf(self, precision: str) -> Path:
        from benchmarks import decode_gguf

        s = self.settings
        kind = LLAMA_FORMATS[precision]
        path = Path(s["folder"]) / f"{s['model']}-{s['layers'] or 'all'}-{kind}.gguf"
        if not path.exists():
            decode_gguf.write(path, s["model"], s["layers"], kind, s["length"])
        return path

    def start(self, system: str, precision: str) -> dict[str, Any]:
        s = self.settings
        folder = Path(s["folder"])
        begin = time.perf_counter()
        if system in ("eager", "forge"):
            if self.shared is None:
                self.shared = TorchModel(s["model"], s["layers"], s["threads"])
            begin = time.perf_counter()
            decoder: Any = TorchDecoder(self.shared, system, precision, s["length"], s["threads"])
        elif system.startswith("openvino"):
            rounds = system == "openvino" and precision != "fp32"
            decoder = OpenvinoDecoder(s["model"], s["layers"], precision, s["threads"], folder, rounds)
        else:
            from benchmarks import decode_gguf

            vocabulary = decode_gguf.SHAPES[s["model"]].vocabulary
            decoder = LlamaDecoder(self._gguf(precision), s["threads"], s["length"], vocabulary)
        self.decoders[system, precision] = decoder
        times, tokens = decoder.steps(3)  # compiles, and brings the weights in
        return {"ready_s": time.perf_counter() - begin, "first_s": times, "tokens": tokens}

    def steps(self, system: str, precision: str, count: int) -> dict[str, Any]:
        times, tokens = self.decoders[system, precision].steps(count)
        return {"times": times, "tokens": tokens}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    worker = Worker(json.loads(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            found = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
