#!/usr/bin/env bash
# Compares the proto files with the last release (the newest tag that holds them), or with the last commit on main
# while nothing is released, by buf's rules for wire and source compatibility.
# usage: check_proto_breaking.sh BUF
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
buf=${1:?usage: check_proto_breaking.sh BUF}

has_proto() { git cat-file -e "$1:proto/rollout_buffer/v1" 2>/dev/null; }

base=
for ref in $(git tag --list 'v*' --sort=-version:refname 2>/dev/null) origin/main main; do
    if has_proto "$ref"; then
        base=$ref
        break
    fi
done
if [ -z "$base" ]; then
    echo "proto-breaking: skipped, no earlier commit holds proto files to compare with"
    exit 0
fi

earlier=$(mktemp -d)
trap 'rm -rf "$earlier"' EXIT
git archive "$base" proto | tar -x -C "$earlier"
"$buf" breaking --against "$earlier/proto"
echo "proto-breaking: compatible with $base ($(git rev-parse --short "$base"))"
