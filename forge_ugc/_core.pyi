"""The C core. Pointers are Python ints; buffers are anything with the buffer protocol (numpy arrays)."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

VERSION: str
TABLE_DTYPES: dict[str, list[tuple[str, str]]]  # "nodes", "values", "constants": numpy structured dtype fields
VALUE_NONE: int  # absent operand
MAX_RANK: int
STEP_WORDS: int

class OpInfo(TypedDict):
    id: int
    name: str
    min_operands: int
    max_operands: int | None
    results: int | None
    flags: list[str]
    attrs: list[tuple[str, str]]  # (name, kind): in table order

class HostResult:
    """Not a class at run time: a host callback returns, for each result, either `(data_ptr, strides, keepalive)` for a
    tensor result or the object itself for an opaque one (shape and dtype are those of the graph's value). The
    memory must be row major and not be that of an argument; `keepalive` owns it and is dropped after the last use."""

def ops() -> list[OpInfo]: ...
def dtypes() -> list[tuple[str, int, str]]: ...  # (name, bytes, class), index = wire number
def passes() -> list[tuple[str, bool]]: ...  # (name, runs by default), in default order
def targets() -> list[str]: ...
def cpu_features() -> list[str]: ...  # what run-time dispatch found, e.g. ["avx2", "fma", "f16c"]
def compile(
    nodes: Any,
    values: Any,
    constants: Any,
    operands: Any,  # uint32
    attrs: Any,  # int64
    dims: Any,  # int64
    outputs: Any,  # uint32
    strings: Sequence[str],
    sources: Sequence[str],
    *,
    target: str = "cpu",
    passes: str = "default",
    alpha: float = 1.0,
    autotune: bool = False,
    keep_text: bool = False,
    executable: bool = True,
    pack: bool = True,
    threads: int = 1,
    keepalive: object = None,  # owners of the constants' memory, held as long as the program
    npu_mode: Literal["none", "emulate", "dispatch"] = "none",  # what runs the instructions on the NPU
    device: NpuDevice | None = None,  # for "dispatch"
    precision: str = "fp16",  # "w8a16", "w4a16"
    fold: bool = True,  # "dispatch": begin with folded graphs, which upgrade() replaces
    f32_types: bool = False,  # float constants of the graphs are f32
    f32_border: bool = False,  # floats cross the NPU's border as f32
    config: str = "",  # of the graph compiler: 'KEY="VALUE" ...'
    cache_dir: str | None = None,  # of compiled graphs
    fail_allocation: int = 0,  # for tests: the Nth allocation fails with MemoryError
    host_precision: str = "fp32",  # weights of products on the host: "w8", "w4", "w4g64", "w4g32"
    share: Program | None = None,  # a program with the same weights as they are now: what is made of them is shared
    progress: object = None,  # three writable int64: phase (base/status.h), done, total
    schedule: bool = True,  # False: program order
) -> Program: ...
def load(
    text: str,
    constants: Sequence[tuple[int, int] | None],  # (address, bytes) of each constant that the text does not spell out
    *,
    target: str = "cpu",
    keep_text: bool = False,
    executable: bool = True,
    pack: bool = True,
    threads: int = 1,
    keepalive: object = None,
    npu_mode: str = "none",
    device: NpuDevice | None = None,
    precision: str = "fp16",
    fold: bool = True,
    f32_types: bool = False,
    f32_border: bool = False,
    config: str = "",
    cache_dir: str | None = None,
    fail_allocation: int = 0,
    host_precision: str = "fp32",
    callees: int = 0,  # functions that there are for the graph's host calls
    share: Program | None = None,
    blobs: Sequence[tuple[str, str, int, int]] = (),  # compiled graphs: (key, checksum, address, bytes)
) -> Program: ...
def optimize_text(
    text: str, passes: str = "default", emit: str = "graph", target: str = "cpu", alpha: float = 1.0
) -> str: ...
def samples(places: Any) -> bytes:
    """`places`: C-contiguous uint64 pairs (address, bytes: 1, 2, 4 or 8). What lies there, each in 8 bytes, the
    rest 0. The caller keeps the memory alive. Raises ValueError for other sizes."""

def npu_likely() -> bool: ...  # whether anything here could be an NPU; loads nothing

class NpuError(RuntimeError):
    """There is no usable NPU, or it failed."""

    reason: str  # "no-loader", "no-driver", "no-permission", "no-device", "no-compiler", "old-extension", ...
    facts: dict[str, Any]  # what was found of the NPU, when opening it failed

class NpuDevice:
    """An NPU; programs that run on it keep it open."""

    facts: dict[str, Any]
    """keys: loader, loader_version, node, node_readable, drivers, driver_version, device_name, device_id, target,
    extension, compiler ("7.10" or None), opset, memory."""

    @classmethod
    def open(cls, loader: str | None = None) -> NpuDevice:
        """Through `loader` (default FORGE_ZE_LOADER, then libze_loader.so.1). Raises NpuError."""

class Program:
    def run(
        self,
        inputs: Sequence[Any],  # int address of row-major memory, or the object of an opaque input
        outputs: Sequence[int],  # int address for each graph output; 0 for opaque ones
        host: Callable[[int, list[Any]], Sequence[Any]] | None = None,
    ) -> list[Any] | None:
        """Runs once, GIL released but in `host`. The caller keeps all memory alive. `host(callee, args)`: args are
        DLPack capsules for tensors (valid during the call only), the objects themselves for opaque operands, None for
        absent ones. Returns the opaque outputs in output order (None in the others' places), or None if there are
        none."""
    def profile(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[int],
        host: Callable[[int, list[Any]], Sequence[Any]] | None = None,
    ) -> list[tuple[int, int, int, int]]:
        """As run(). (first, count, start_ns, end_ns) of each task: instructions first .. first + count of schedule()'s,
        more than one where a device ran them in one go. By CLOCK_MONOTONIC."""
    def schedule(self) -> dict[str, Any]:
        """instructions [{op, device, type, source}] in order; buffers [{id, device, bytes, offset, slot, first, last}]
        of the arenas, first and last being positions of instructions; segments [(first, count)]; arena_bytes
        {device: bytes}. Of a host call, op is the ATen name; type is that of the first result that is written."""
    def may_share(self, input: int, output: int) -> bool:
        """Whether run() takes one address for this input and this output, which is then written over it."""
    def text(self, stage: str) -> str: ...  # "capture", "after:cse", "final", "npuir", "schedule"
    def portable(
        self,
    ) -> tuple[str, list[tuple[str | None, str, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]] | None]]: ...
    def hosts(self) -> list[tuple[int, int, list[tuple[str, tuple[int, ...]]]]]:
        """(callee, number of operands, types of the results) of each host call, in order."""
    def types(self) -> tuple[list[tuple[str, tuple[int, ...]]], list[tuple[str, tuple[int, ...]]]]: ...
    def report(self) -> dict[str, Any]:
        """keys: passes [{name, ms, nodes_before, nodes_after, cost_before, cost_after}], table_ms, passes_ms, lower_ms,
        alloc_ms, schedule_ms, pack_ms, npu_ms, nodes_table, nodes_final (executed instructions), alpha,
        remarks [{pass, text, source, count}], buffers {virtual, physical, rho, arena_bytes, lower_bound_bytes},
        transitions {before, after}, groups {groups, instructions}, placement {device: count}, packed_bytes,
        quantised_bytes, arena_bytes {device: bytes}, instructions {op name: count}."""
    def npu_report(self) -> dict[str, Any]:
        """keys: segments, flops {cpu, npu}; with a session on a device also tier, blocks, calls, artefact_hits,
        cache_hits, compiled (these three: where the blocks came from), artefact_refused (of load()'s blobs, by the
        driver or for other arguments than the block has), refused_reason, emit_ms, compile_ms, weights_ms,
        blob_bytes, weight_bytes."""
    def npu_blobs(self, write: Callable[[str, str, memoryview], object]) -> dict[str, int]:
        """Calls write(key, checksum, bytes) for each compiled graph of the present tier that is to be had; the memory
        is released after the call. Returns {"tier", "graphs"}; graphs is 0 if nothing is dispatched."""
    def upgrade(self) -> bool:
        """Compiles the graphs with constant weights, GIL released, and swaps them in between calls. False if
        stop_upgrade() ended it. Raises NpuError; nothing changes then."""
    def stop_upgrade(self) -> None: ...
    def openvino_models(
        self,
        write: Callable[[Literal["xml", "bin", "weight"], int, bytes], object],
        *,
        fold: Literal["never", "always", "cut", "constant"] = "always",
        precision: str = "fp16",
        f32_types: bool = False,
        f32_border: bool = False,
        forms: int | None = None,  # FORM_* bits of csrc/npu/npu.h
    ) -> dict[str, Any]:
        """The segments as OpenVINO models. `write` gets xml and bin of each block and each weight argument. Returns
        {"blocks": [{inputs, outputs, instructions, bin_bytes, weights, columns}],
        "calls": [{segment, block, inputs, outputs, weights, first_column}]}: ports are {dtype, shape}; a call's inputs
        and outputs name memory ("input 0", "output 0", "value 12"), its weights are {weight: number, constant, part,
        dtype, shape, bytes} in the order of the block's Parameters after the inputs."""
