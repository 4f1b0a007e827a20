#!/usr/bin/env bash
# Builds the wheel of the last release out of this repository's history and unpacks it into .cache/released. Instant when
# it is there; does nothing where the history is not. The last release is the commit that kept its wire contract (make
# proto-release).
# usage: released.sh PYTHON   (PYTHON: an interpreter with pip)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:?usage: released.sh PYTHON}
released=$PWD/.cache/released

# In a shallow clone the oldest commit that is there seems to have made every file.
if [ "$(git rev-parse --is-shallow-repository 2> /dev/null)" != false ]; then
    echo "released: the history that is here does not reach the last release: git fetch --unshallow"
    exit 0
fi
commit=$(git log -1 --format=%H -- proto/released.binpb)
[ "$(cat "$released/commit" 2> /dev/null)" != "$commit" ] || exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
git archive "$commit" | tar -x -C "$work/source"
"$python" -m pip --disable-pip-version-check wheel -qq --no-deps --wheel-dir "$work" "$work/source"
"$python" -m zipfile -e "$work"/rollout_buffer-*.whl "$work/unpacked"
echo "$commit" > "$work/unpacked/commit"
mkdir -p .cache
rm -rf "$released"
mv "$work/unpacked" "$released"
