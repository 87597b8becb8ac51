"""The systems that are compared: each takes an nn.Module and example arguments to a callable, in timed phases.

What a process imports before the clock starts is in `imports`: a system's own packages, and those that it or torch
loads when it is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .measure import phase

Call = Callable[[], Any]
EXPORT_IMPORTS = (
    "torch.export",
    "torch._dynamo",
    "torch._export",
    "torch._functorch.partitioners",
    "torch.fx.experimental.proxy_tensor",
    "torch._subclasses.fake_tensor",
    "networkx",
    "transformers.integrations.executorch",
)


@dataclass
class Built:
    """A callable without arguments for each set of inputs, and how it came about."""

    bind: Callable[[tuple[Any, ...]], Call]  # arguments -> a call of the system on them
    phases: dict[str, float]  # milliseconds
    facts: dict[str, Any] = field(default_factory=dict)
    keeps_model: bool = True  # it reads the torch model's weights
    lazy: bool = False  # compiles in its first call


class System:
    name: ClassVar[str]
    label: ClassVar[str]
    package: ClassVar[str] = "torch"
    imports: ClassVar[tuple[str, ...]] = ()
    # Memory in multiples of the weights', beside the model's own: while compiling, and from then on.
    peak: ClassVar[float] = 0.0
    steady: ClassVar[float] = 0.0

    def __init__(self, options: dict[str, str] | None = None) -> None:
        self.options = options or {}

    @classmethod
    def missing(cls) -> str:
        """The package that is not installed, if one is not."""
        return "" if importlib.util.find_spec(cls.package) else cls.package

    def prepare(self) -> None:
        for module in self.imports:
            try:
                importlib.import_module(module)
            except ImportError:  # torch moves its private modules
                if not module.startswith(("torch._", "transformers.")):
                    raise

    def build(self, model: Any, args: tuple[Any, ...], threads: int, shared: dict[str, Any]) -> Built:
        """`shared`: what systems of one process hand to each other."""
        raise NotImplementedError


class Eager(System):
    name, label = "eager", "eager"

    def build(self, model: Any, args: tuple[Any, ...], threads: int, shared: dict[str, Any]) -> Built:
        return Built(lambda given: lambda: model(*given), {})


class Forge(System):
    """Options after a colon: `forge:alpha=0.4`, `forge:without=attention_fusion`, `forge:pack=False`."""

    name, label, package = "forge", "Forge-UGC", "forge_ugc"
    imports: ClassVar[tuple[str, ...]] = ("forge_ugc", "transformers.integrations.executorch")
    peak, steady = 0.4, 0.4

    def build(self, model: Any, args: tuple[Any, ...], threads: int, shared: dict[str, Any]) -> Built:
        import forge_ugc

        phases: dict[str, float] = {}
        settings: dict[str, Any] = {"device": "cpu", "num_threads": threads, "progress": False}
        for name, value in self.options.items():
            if name == "without":
                settings["passes"] = pipeline_without(value)
            elif name in ("pack", "autotune"):
                settings[name] = value == "True"
            else:
                settings[name] = float(value) if name == "alpha" else value
        with phase(phases, "compile"):
            compiled = forge_ugc.compile(model, args, **settings)
        report = compiled.report
        inside = {name.removesuffix("_ms"): ms for name, ms in report["phases"].items() if name != "total_ms"}
        phases = {**inside, "rest": max(0.0, phases["compile"] - sum(inside.values()))}
        facts = {"capture": report["capture"], "weights": report["weights"]}
        return Built(lambda given: lambda: compiled(*given), phases, facts)


class ForgeExport(Forge):
    """The same with torch.export for capture: what the fast capture saves."""

    name, label = "forge-export", "Forge-UGC, torch.export"
    imports = (*Forge.imports, *EXPORT_IMPORTS)

    def __init__(self, options: dict[str, str] | None = None) -> None:
        super().__init__({**(options or {}), "capture": "export"})


def pipeline_without(name: str) -> str:
    """The default pipeline with every run of one pass left out."""
    import torch

    import forge_ugc

    names = [p["name"] for p in forge_ugc.compile(torch.nn.Identity().eval(), (torch.zeros(1),)).report["passes"]]
    if name not in names:
        raise ValueError(f"no pass {name!r} in the default pipeline: {', '.join(dict.fromkeys(names))}")
    return ",".join(n for n in names if n != name) or "none"


class OpenVino(System):
    """convert_model of the exported program, compile_model with the LATENCY hint."""

    name, label, package = "openvino", "OpenVINO f32", "openvino"
    imports = (
        *EXPORT_IMPORTS,
        "openvino",
        "openvino.frontend.pytorch.fx_decoder",
        "openvino.frontend.pytorch.torchdynamo",
    )
    peak, steady = 2.0, 1.3
    precision: ClassVar[str | None] = "f32"

    def build(self, model: Any, args: tuple[Any, ...], threads: int, shared: dict[str, Any]) -> Built:
        import openvino
        import torch

        phases: dict[str, float] = {}
        if "openvino" not in shared:
            with phase(phases, "export"):
                program = torch.export.export(model, args, strict=False)
            with phase(phases, "convert"):
                shared["openvino"] = openvino.convert_model(program)
            shared["openvino_phases"] = dict(phases)
        else:  # the same conversion serves both precisions; its time belongs to each
            phases |= shared["openvino_phases"]
        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        if self.precision:
            settings["INFERENCE_PRECISION_HINT"] = self.precision
        with phase(phases, "compile"):
            compiled = openvino.Core().compile_model(shared["openvino"], "CPU", settings)
        ran = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()

        def bind(given: tuple[Any, ...]) -> Call:
            arrays = [t.numpy() for t in given]
            return lambda: compiled(arrays, share_inputs=True, share_outputs=True)[0]

        return Built(bind, phases, {"precision": ran}, keeps_model=False)


class OpenVinoDefault(OpenVino):
    name, label = "openvino-default", "OpenVINO default"
    precision = None


class OnnxRuntime(System):
    """torch.onnx.export of the exported program (dynamo), saved with its weights beside it, and a session."""

    name, label, package = "onnxruntime", "ONNX Runtime", "onnxruntime"
    imports = (
        *EXPORT_IMPORTS,
        "onnx",
        "onnxruntime",
        "onnxscript",
        "onnxscript.rewriter.onnx_fusions",
        "onnxscript.optimizer",
        "onnxscript.function_libs.torch_lib.ops",
        "torch.onnx._internal.exporter._core",
    )
    peak, steady = 2.0, 0.8

    @classmethod
    def missing(cls) -> str:
        return next((p for p in ("onnxruntime", "onnx", "onnxscript") if not importlib.util.find_spec(p)), "")

    def build(self, model: Any, args: tuple[Any, ...], threads: int, shared: dict[str, Any]) -> Built:
        import onnxruntime
        import torch

        phases: dict[str, float] = {}
        with phase(phases, "export"):
            exported = torch.export.export(model, args, strict=False)
        with tempfile.TemporaryDirectory(dir=shared["scratch"]) as folder:
            path = Path(folder) / "model.onnx"
            with phase(phases, "convert"):
                program = torch.onnx.export(exported, (), dynamo=True, optimize=True, verbose=False)
            assert program is not None
            with phase(phases, "save"):
                program.save(path, external_data=True)
            del program, exported
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            with phase(phases, "session"):
                session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]

        def bind(given: tuple[Any, ...]) -> Call:
            feeds = {name: t.numpy() for name, t in zip(names, given, strict=True)}
            return lambda: session.run(None, feeds)[0]

        return Built(bind, phases, keeps_model=False)


class Inductor(System):
    """torch.compile with default settings, from an empty cache. It compiles in the first call."""

    name, label = "inductor", "inductor"
    imports = (
        *EXPORT_IMPORTS,
        "torch._inductor.compile_fx",
        "torch._inductor.codecache",
        "torch._inductor.codegen.cpp",
    )
    peak, steady = 0.5, 0.3

    def build(self, model: Any, args: tuple[Any, ...], threads: int, shared: dict[str, Any]) -> Built:
        import torch

        phases: dict[str, float] = {}
        with phase(phases, "wrap"):
            compiled: Any = torch.compile(model, dynamic=False)
        return Built(lambda given: lambda: compiled(*given), phases, lazy=True)


class Export(System):
    """torch.export alone: what it takes beside Forge's capture. It gives nothing to call."""

    name, label = "export", "torch.export alone"
    imports = EXPORT_IMPORTS

    def build(self, model: Any, args: tuple[Any, ...], threads: int, shared: dict[str, Any]) -> Built:
        import torch

        phases: dict[str, float] = {}
        with phase(phases, "export"):
            torch.export.export(model, args, strict=False)
        return Built(lambda given: lambda: None, phases)


SYSTEMS: dict[str, type[System]] = {
    cls.name: cls for cls in (Forge, Eager, OpenVino, OpenVinoDefault, OnnxRuntime, Inductor, Export, ForgeExport)
}
COMPARED = ("forge", "eager", "openvino", "openvino-default", "onnxruntime", "inductor")


def system(text: str) -> System:
    """From its name and options: "forge:alpha=0.4"."""
    name, _, rest = text.partition(":")
    if name not in SYSTEMS:
        raise ValueError(f"unknown system {name!r}; known are {', '.join(SYSTEMS)}")
    return SYSTEMS[name](dict(item.split("=", 1) for item in rest.split(",") if item))


def label(text: str) -> str:
    name, _, rest = text.partition(":")
    return SYSTEMS[name].label + (f" ({rest})" if rest else "")
