#!/usr/bin/env bash
# Fails if the committed generated code, or docs/protocol_reference.md, is not what the proto files generate today.
# usage: check_proto.sh PYTHON   (PYTHON: an interpreter with constraints/proto.txt)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:?usage: check_proto.sh PYTHON}

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
scripts/generate_proto.sh "$python" "$fresh"

if ! diff -rq --exclude='*.proto' --exclude='__init__.py' --exclude='py.typed' --exclude='*.binpb' --exclude='__pycache__' \
    "$fresh" proto; then
    echo "proto-check: the generated code does not match the proto files; run 'make proto' and commit" >&2
    exit 1
fi
echo "proto-check: $(find "$fresh" -name '*.py' | wc -l) generated modules match their proto files"
"$python" -m scripts.protocol_reference --check
