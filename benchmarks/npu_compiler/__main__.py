"""One IR through the compiler; prints one line of JSON. Exit status 1: the compiler refused it."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.npu_compiler import compile_ir


def main() -> int:
    parser = argparse.ArgumentParser(prog="npu_compile.sh", description=__doc__)
    parser.add_argument("xml", help="OpenVINO IR; its weights lie beside it as .bin")
    parser.add_argument("target", nargs="?", default="NPU4000", help="NPU3720, NPU4000 (default), NPU5010, NPU5020")
    parser.add_argument("-e", "--estimate", action="store_true", help="add the compiler's estimate of latency")
    parser.add_argument("-o", "--blob", help="where to write the compiled graph")
    parser.add_argument("-c", "--config", default="", help="""more options: 'NPU_TILES="2"'""")
    parser.add_argument("-p", "--mode-params", default="", help="words for NPU_COMPILATION_MODE_PARAMS")
    parser.add_argument("-t", "--trace", help="write the schedule there, a Chrome trace; implies -e")
    parser.add_argument("-l", "--log", help="write the compiler's log there")
    args = parser.parse_args()
    result = compile_ir(
        args.xml,
        args.target,
        estimate=args.estimate,
        config=args.config,
        blob=args.blob,
        mode_params=args.mode_params,
        trace=args.trace,
    )
    if args.log:
        with open(args.log, "w") as out:
            out.write(result.log)
    print(json.dumps(result.to_dict()))
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
