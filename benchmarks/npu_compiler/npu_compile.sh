#!/bin/bash
# Compile an OpenVINO IR for an Intel NPU, offline; prints one line of JSON. Run setup.sh once first; --help has the options.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec python3 -m benchmarks.npu_compiler "$@"
