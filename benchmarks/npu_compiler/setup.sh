#!/bin/bash
# Install what npu_compile.sh needs. What is there already is left alone; only one runs at a time.
#   apt   wine64, the mingw-w64 C compiler            (needs root only if they are missing)
#   PyPI  the Windows wheel of openvino, from which three DLLs are taken (openvino itself is not installed)
# Environment:
#   NPUC_HOME   where everything goes      (default: ~/.cache/npuc)
#   OV_VERSION  openvino release on PyPI   (default: 2026.4.1; the wheel must carry the NPU compiler)
#   OV_WHEEL    an openvino *-win_amd64.whl already at hand (then nothing is downloaded)
#   PYTHON      a Python with pip          (default: python3)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${NPUC_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/npuc}
ver=${OV_VERSION:-2026.4.1}
python=${PYTHON:-python3}
mkdir -p "$home/dll"
exec 9>"$home/lock"
flock 9

# 1. wine and the cross compiler
find_wine() { for w in "${WINE:-}" "$(command -v wine64 || true)" /usr/lib/wine/wine64 "$(command -v wine || true)"; do
                [ -n "$w" ] && [ -x "$w" ] && { echo "$w"; return 0; }; done; return 1; }
need=()
find_wine >/dev/null || need+=(wine64)
command -v x86_64-w64-mingw32-gcc >/dev/null || need+=(gcc-mingw-w64-x86-64-win32)
if [ ${#need[@]} -gt 0 ]; then
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${need[@]}"
fi
wine=$(find_wine)

# 2. the compiler: loader (VCL entry points), compiler, TBB. They need nothing else from the wheel.
dlls="openvino_intel_npu_compiler_loader.dll openvino_intel_npu_compiler.dll tbb12.dll"
have=1; for d in $dlls; do [ -s "$home/dll/$d" ] || have=0; done
if [ $have = 0 ]; then
    whl=${OV_WHEEL:-}
    if [ -z "$whl" ]; then
        "$python" -m pip download -q --no-deps --only-binary=:all: --platform win_amd64 --python-version 3.11 \
            --implementation cp --dest "$home/whl" "openvino==$ver"
        whl=$(ls "$home/whl"/openvino-*.whl | head -1)
    fi
    "$python" - "$whl" "$home/dll" $dlls <<'P'
import os, sys, zipfile
whl, dst, names = sys.argv[1], sys.argv[2], sys.argv[3:]
with zipfile.ZipFile(whl) as z:
    for n in names:
        part = os.path.join(dst, n + ".part")
        with z.open("openvino/libs/" + n) as a, open(part, "wb") as b:
            while chunk := a.read(1 << 20):
                b.write(chunk)
        os.replace(part, os.path.join(dst, n))
P
    rm -rf "$home/whl"
fi

# 3. the driver program
if [ ! -s "$home/npu_compile.exe" ] || [ "$here/npu_compile.c" -nt "$home/npu_compile.exe" ]; then
    x86_64-w64-mingw32-gcc -O2 -s -o "$home/npu_compile.exe" "$here/npu_compile.c"
fi

# 4. a wine prefix of its own (no display, no mono or gecko needed)
export WINEPREFIX="$home/prefix" WINEARCH=win64 WINEDEBUG=-all WINEDLLOVERRIDES="mscoree=;mshtml="
[ -s "$WINEPREFIX/system.reg" ] || "$wine" wineboot -i >/dev/null 2>&1 9>&-

# 5. does it answer? wine.path says that all is there
(cd "$home" && "$wine" npu_compile.exe dll/openvino_intel_npu_compiler_loader.dll none options=1 9>&-)
echo "$wine" >"$home/wine.path"
