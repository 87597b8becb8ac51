"""Builds forge_ugc._core from csrc/. What the package is stands in pyproject.toml; this file knows how to compile C.

Switches, read from the environment:
    FORGE_DEBUG=1      no optimisation, assertions on
    FORGE_SANITIZE=1   AddressSanitizer and UndefinedBehaviorSanitizer, assertions on
    FORGE_WERROR=1     every warning is an error
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CSRC = Path("csrc")
NOT_IN_MODULE = ("tool", "softnpu")  # rooms that build into programs or libraries of their own

DEBUG = os.environ.get("FORGE_DEBUG") == "1"
SANITIZE = os.environ.get("FORGE_SANITIZE") == "1"
WERROR = os.environ.get("FORGE_WERROR") == "1"

COMMON = ["-std=c11", "-D_GNU_SOURCE", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-pthread"]
# Files that need an instruction set say so in their name; no other file may use it, or dispatch would be unsafe.
ISA = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
    "_avx512bf16": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mf16c"],
}


def mode() -> str:
    return "sanitize" if SANITIZE else "debug" if DEBUG else "release"


def mode_flags() -> list[str]:
    if SANITIZE:
        return ["-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer", *sanitizers()]
    return ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O3"]


def sanitizers() -> list[str]:
    return ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"] if SANITIZE else []


def flags_for(source: str) -> list[str]:
    flags = COMMON + mode_flags()
    if WERROR:
        flags += ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    for suffix, isa in ISA.items():
        if Path(source).stem.endswith(suffix):
            return [*flags, *isa, "-ffp-contract=fast"]
    # Without contraction the portable kernels round as torch's do.
    return [*flags, "-ffp-contract=off"]


def c_sources() -> list[str]:
    return sorted(str(p) for p in CSRC.rglob("*.c") if p.relative_to(CSRC).parts[0] not in NOT_IN_MODULE)


def newest_header() -> float:
    headers = [p for pattern in ("*.h", "*.def", "*.inc") for p in CSRC.rglob(pattern)]
    return max((p.stat().st_mtime for p in [*headers, Path("setup.py")]), default=0.0)


class ParallelBuild(build_ext):
    """Compiles on all cores, and only what is older than its source or any header."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # pip gives each editable build a new temporary folder; one place for each mode keeps the objects.
        warn = "-werror" if WERROR else ""
        self.build_temp = os.path.join("build", f"objects-{mode()}{warn}-{sys.implementation.cache_tag}")

    def build_extension(self, ext: Extension) -> None:
        headers = newest_header()

        def compile_one(source: str) -> str:
            (target,) = self.compiler.object_filenames([source], output_dir=self.build_temp)
            changed = max(headers, os.path.getmtime(source))
            if not os.path.exists(target) or os.path.getmtime(target) <= changed:
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    include_dirs=ext.include_dirs,
                    extra_postargs=flags_for(source),
                )
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), libraries=ext.libraries, extra_postargs=ext.extra_link_args
        )


class WithSoftwareNpu(build_py):
    """Puts the software NPU's sources into the package: forge_ugc/softnpu.py builds them where they are used."""

    SOURCES = sorted(f for f in (CSRC / "softnpu").iterdir() if f.suffix in (".c", ".h", ".def"))

    def _targets(self) -> list[str]:
        return [os.path.join(self.build_lib, "forge_ugc", "_softnpu", source.name) for source in self.SOURCES]

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout has them
            return
        for source, target in zip(self.SOURCES, self._targets(), strict=True):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *([] if self.editable_mode else self._targets())]


setup(
    ext_modules=[
        Extension(
            "forge_ugc._core",
            c_sources(),
            include_dirs=[str(CSRC)],
            libraries=["m", "pthread", "dl"],
            extra_link_args=["-pthread", *sanitizers()],
        )
    ],
    cmdclass={"build_ext": ParallelBuild, "build_py": WithSoftwareNpu},
)
