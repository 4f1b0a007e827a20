#!/usr/bin/env bash
# Compares the proto files with those of the last release (proto/released.binpb, which `make proto-release` writes), by
# buf's rules for wire and source compatibility.
# usage: check_proto_breaking.sh BUF
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
buf=${1:?usage: check_proto_breaking.sh BUF}
released=proto/released.binpb

if [ ! -e "$released" ]; then
    echo "proto-breaking: skipped, nothing has been released to compare with ($released)"
    exit 0
fi
"$buf" breaking proto --against "$released"
echo "proto-breaking: compatible with the last release"
