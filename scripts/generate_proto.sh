#!/usr/bin/env bash
# Generates the Python code and type stubs of every proto file.
# usage: generate_proto.sh PYTHON OUT   (PYTHON: an interpreter with constraints/proto.txt; OUT: a package root)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:?usage: generate_proto.sh PYTHON OUT}
out=${2:?usage: generate_proto.sh PYTHON OUT}

# protoc finds the mypy plugins on PATH.
bin=$(cd "$(dirname "$python")" && pwd)
mkdir -p "$out"
mapfile -t sources < <(find proto -name '*.proto' | LC_ALL=C sort)
PATH="$bin:$PATH" "$python" -m grpc_tools.protoc -Iproto \
    --python_out="$out" --grpc_python_out="$out" \
    --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
    "${sources[@]}"

# protoc writes a gRPC module also for a file without a service; nothing is in it.
for source in "${sources[@]}"; do
    if ! grep -q '^service ' "$source"; then
        stem="$out/${source#proto/}"
        rm -f "${stem%.proto}_pb2_grpc.py" "${stem%.proto}_pb2_grpc.pyi"
    fi
done
