#!/usr/bin/env bash
# Installs SGLang for a machine without CUDA into a virtual environment of its own. See README.md.
#
# usage:       install.sh VENV_DIR
# environment: PYTHON           interpreter to build on (default python3; 3.11 or later, on x86-64 Linux)
#              TORCH_CPU_INDEX  index with CPU builds of torch, asked only if pip's configured ones have none
#
# Idempotent: a finished install carries a stamp of its inputs, and is left alone while they are unchanged.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:?usage: install.sh VENV_DIR}
python=${PYTHON:-python3}
torch_cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
streams=3 # pip waits for the index most of the time; more than three only compete for the disk

say() { printf 'sglang-cpu: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

[[ $(uname -s) == Linux ]] || die "SGLang serves on Linux only; this is $(uname -s)"
command -v "$python" >/dev/null || die "no interpreter '$python'; set PYTHON to a Python 3.11 or later"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$("$python" --version) is too old: 3.11 or later is needed"

wanted=$( (cd "$here" && find install.sh requirements.txt engine.txt shims -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum
           "$python" --version) | sha256sum | cut -d' ' -f1)
mkdir -p "$(dirname "$venv")"
venv=$(cd "$(dirname "$venv")" && pwd)/$(basename "$venv")
stamp=$venv/.sglang-cpu-stamp
if command -v flock >/dev/null; then
    lock=${TMPDIR:-/tmp}/sglang-cpu-$(id -u)-$(printf %s "$venv" | sha256sum | cut -c1-16).lock
    exec 9>"$lock"
    flock -w 900 9 || die "another install into $venv has been running for 15 minutes (it holds $lock)"
fi
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    say "$venv is up to date"
    exit 0
fi

free_mb=$(df -Pm "$(dirname "$venv")" | awk 'NR == 2 { print $4 }')
((free_mb > 3000)) || die "about 2.3 GB is needed and only $free_mb MB is free beside $venv"

started=$SECONDS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# An interrupted or outdated install is cleared rather than patched: without a resolver pip would keep leftovers.
if [[ -e $venv && ! -f $venv/pyvenv.cfg ]]; then
    die "$venv exists and is no virtual environment; it is left alone. Name another directory"
fi
rm -rf "$venv"
# The pip that comes with the interpreter can install into the new environment, which saves copying pip into it.
"$python" -m venv --without-pip "$venv"
pip=("$python" -m pip --python "$venv/bin/python")
if ! "${pip[@]}" --version >/dev/null 2>&1; then
    rm -rf "$venv"
    "$python" -m venv "$venv" || die "$python has neither pip nor the venv module's ensurepip (Debian: apt install python3-venv)"
    pip=("$venv/bin/python" -m pip)
fi

# --no-deps: the lists are complete, and SGLang's declared dependencies would bring CUDA. --no-compile: of 17,000
# files a text server imports a fifth; the check below compiles those.
install() { "${pip[@]}" install -q --no-deps --no-compile --no-input --disable-pip-version-check "$@"; }
install_engine() {
    install -r "$here/engine.txt" || install --extra-index-url "$torch_cpu_index" -r "$here/engine.txt"
}

say "installing into $venv (about 320 MB to download, 2 GB on disk)"
grep -v '^#' "$here/requirements.txt" | split -n "r/$streams" - "$work/requirements."
declare -A job_of
install_engine >"$work/engine.log" 2>&1 & job_of[engine]=$!
for part in "$work"/requirements.*; do
    install -r "$part" >"$part.log" 2>&1 & job_of[$(basename "$part")]=$!
done
failed=()
for name in "${!job_of[@]}"; do
    wait "${job_of[$name]}" || failed+=("$name")
done
if ((${#failed[@]})); then
    for name in "${failed[@]}"; do
        say "pip failed for $name:"
        grep -v '^WARNING: Location' "$work/$name.log" | tail -n 15 >&2
    done
    die "not installed. Behind a mirror without CPU builds of torch, set TORCH_CPU_INDEX to an index that has them"
fi

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -r "$here"/shims/. "$site/"
say "packages in place after $((SECONDS - started)) s; importing the server once"
# Also the scheduler and the model registry: their bytecode is then there when the first server starts, which is
# worth 7 s of its start. A caller's PYTHONDONTWRITEBYTECODE would undo that.
modules='sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.registry'
if ! env -u PYTHONDONTWRITEBYTECODE SGLANG_USE_CPU_ENGINE=1 \
    "$venv/bin/python" -W ignore -c "import $modules" >"$work/import.log" 2>&1; then
    tail -n 15 "$work/import.log" >&2
    die "SGLang was installed but cannot be imported"
fi
echo "$wanted" >"$stamp"
say "ready after $((SECONDS - started)) s"
