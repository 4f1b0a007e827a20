#!/usr/bin/env bash
# Builds the wheel of the last release out of this repository's history and unpacks it into .cache/released; instant when
# it is there. The last release is the commit that kept its wire contract (make proto-release).
# usage: released.sh PYTHON   (PYTHON: an interpreter with pip)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:?usage: released.sh PYTHON}
released=$PWD/.cache/released

commit=$(git log -1 --format=%H -- proto/released.binpb)
[ -n "$commit" ] || { echo "released: the release is not in the history that is here: git fetch --unshallow" >&2; exit 1; }
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
