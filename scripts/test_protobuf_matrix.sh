#!/usr/bin/env bash
# Installs the built wheel with its core dependencies alone: first by itself, to see what comes along, then once per
# supported protobuf generation and once at the declared floors, and there imports the generated code and runs every
# test file marked `matrix`.
# usage: test_protobuf_matrix.sh [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}

# name | exact versions. The first row is what pyproject.toml promises as the least.
rows=(
    "floors|protobuf==5.27.2 grpcio==1.66.0 numpy==1.26.0 xxhash==3.4.1"
    "protobuf-5|protobuf==5.29.6 grpcio==1.85.1 numpy==2.4.6 xxhash==4.1.0"
    "protobuf-6|protobuf==6.33.6 grpcio==1.85.1 numpy==2.4.6 xxhash==4.1.0"
    "protobuf-7|protobuf==7.36.2 grpcio==1.85.1 numpy==2.4.6 xxhash==4.1.0"
)

mapfile -t files < <(grep -rlE --include='test_*.py' 'pytest\.mark\.matrix' tests | LC_ALL=C sort)
if [ ${#files[@]} -eq 0 ]; then
    echo "matrix: no test file is marked pytest.mark.matrix" >&2
    exit 1
fi

# An environment without a pip of its own is made in a tenth of the time; bytecode is compiled of what is imported.
environment() {
    test -x "$1/bin/python" || "$python" -m venv --without-pip "$1"
}
pip_of() {
    "$python" -m pip --disable-pip-version-check --python "$1/bin/python" "${@:2}"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The test tools as pinned for .venv, without what a row chooses itself.
grep -vE '^(grpcio|numpy|protobuf|xxhash)' constraints.txt > "$work/constraints.txt"

echo "matrix: building the wheel"
rm -rf build
"$python" -m pip --disable-pip-version-check wheel -qq --no-deps --wheel-dir "$work" .
rm -rf build
# The tests, and the pages that they check, without the sources beside them: what they import can only be the wheel.
mkdir "$work/run"
cp -r tests docs pyproject.toml "$work/run"

echo "matrix: core, the newest that pip chooses"
environment "$work/core"
pip_of "$work/core" install -qq --no-compile "$work"/*.whl
(cd "$work" && core/bin/python -W error run/tests/packaging/core_wheel.py)

run_row() {
    local name=${1%%|*} versions
    read -ra versions <<< "${1#*|}"
    local venv=.venv-matrix/$name
    echo "matrix: $name, ${versions[*]}"
    environment "$venv"
    pip_of "$venv" install -qq --no-compile -c "$work/constraints.txt" "${versions[@]}" \
        hypothesis pytest pytest-asyncio pytest-timeout
    pip_of "$venv" install -qq --no-compile --force-reinstall --no-deps "$work"/*.whl
    # pip check: the wheel's own bounds must admit the row.
    pip_of "$venv" check
    # From another folder, so that the wheel is what is imported; a warning about versions counts as a failure.
    (cd "$work" && "$OLDPWD/$venv/bin/python" -W error - < "$OLDPWD/scripts/import_generated.py")
    (cd "$work/run" && "$OLDPWD/$venv/bin/python" -m pytest -q -p no:cacheprovider -m matrix "${files[@]}")
}

# Two at a time: an install waits for the index and the disk half of its time.
echo "matrix: ${#rows[@]} environments, two at a time"
for ((at = 0; at < ${#rows[@]}; at += 2)); do
    pair=("${rows[@]:at:2}")
    for row in "${pair[@]}"; do
        (run_row "$row") > "$work/${row%%|*}.log" 2>&1 &
    done
    failed=0
    for row in "${pair[@]}"; do
        wait -n || failed=1
    done
    for row in "${pair[@]}"; do
        cat "$work/${row%%|*}.log"
    done
    [ "$failed" -eq 0 ] || exit 1
done
echo "matrix: ${#rows[@]} environments passed"
