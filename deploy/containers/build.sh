#!/usr/bin/env bash
# Builds the images of a commit into an OCI layout, a bill of materials beside each. Takes no daemon, and no registry of
# images where the base is assembled; pip in the build asks the package index that pip on this machine asks.
# usage: build.sh PYTHON LAYOUT IMAGE...   (IMAGE: service, worker; PYTHON: an interpreter that can make an environment)
# environment: BASE    base image, for example docker.io/library/python:3.12.12-slim-bookworm; without it, one is
#                      assembled of Debian's packages, whose Python is 3.11
#              COMMIT  default: the one that is checked out; what is not committed is in no image
# The same commit, base and packages give the same digests.
set -euo pipefail
umask 022
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${1:?usage: build.sh PYTHON LAYOUT IMAGE...}
layout=$(realpath -m "${2:?usage: build.sh PYTHON LAYOUT IMAGE...}")
shift 2

fail() {
    echo "image: $*" >&2
    exit 1
}
for program in buildah git umoci $([ -n "${BASE:-}" ] || echo mmdebstrap); do
    command -v "$program" > /dev/null || fail "$program is missing; Debian and Ubuntu: apt-get install $program"
done

work=$(mktemp -d)
# Storage of the build's own: nothing of it is left, and nobody else's images are seen.
buildah() {
    command buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run" "$@"
}
trap 'buildah umount --all > /dev/null 2>&1 || true; rm -rf "$work"' EXIT

commit=$(git rev-parse "${COMMIT:-HEAD}")
# The date of all that is laid over the base.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct "$commit")
export SOURCE_DATE_EPOCH
mkdir "$work/context"
git archive "$commit" | tar -x -C "$work/context"
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$work/context/pyproject.toml")

tools=$PWD/.cache/image-tools
if ! cmp -s constraints/image.txt "$tools/installed.txt"; then
    [ -x "$tools/bin/python" ] || "$python" -m venv "$tools"
    "$tools/bin/python" -m pip --disable-pip-version-check install -qq -c constraints/image.txt \
        'cyclonedx-python-lib[json-validation]'
    cp constraints/image.txt "$tools/installed.txt"
fi

if [ -z "${BASE:-}" ]; then
    BASE=localhost/python:bookworm
    echo "image: a base of Debian's packages"
    mkdir "$work/base"
    # Bytecode that does not ask for the times of its sources: layers have one time for all.
    # shellcheck disable=SC2016  # hooks expand $1 themselves
    SOURCE_DATE_EPOCH=0 mmdebstrap --quiet --variant=essential \
        --include=ca-certificates,libstdc++6,passwd,python-is-python3,python3,python3-venv \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        --customize-hook='chroot "$1" python3 -m compileall -q -f --invalidation-mode unchecked-hash /usr/lib/python3.11 /usr/lib/python3' \
        bookworm "$work/base/base.tar"
    printf 'FROM scratch\nADD base.tar /\nCMD ["python3"]\n' > "$work/base/Containerfile"
    buildah build -q --isolation chroot --timestamp 0 -t "$BASE" -f "$work/base/Containerfile" "$work/base" > /dev/null
fi

# Pip asks the index that this machine's asks, by this machine's certificates.
{
    echo '[global]'
    echo 'constraint = /etc/pip-constraints.txt'
    index=$("$tools/bin/python" -m pip config get global.index-url 2> /dev/null) && echo "index-url = $index"
    [ -z "${PIP_CERT:-}" ] || echo 'cert = /etc/pip-certificates.crt'
} > "$work/pip.conf"

rm -rf "$layout"
mkdir -p "$layout"
for image in "$@"; do
    echo "image: $image"
    target=(); [ "$image" = service ] || target=(--target "$image")
    buildah build -q --isolation chroot --timestamp "$SOURCE_DATE_EPOCH" --format oci \
        --build-arg BASE="$BASE" --build-arg SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" \
        --label org.opencontainers.image.revision="$commit" --label org.opencontainers.image.version="$version" \
        --volume "$work/pip.conf:/etc/pip.conf:ro" \
        --volume "$PWD/constraints/image.txt:/etc/pip-constraints.txt:ro" \
        ${PIP_CERT:+--volume "$PIP_CERT:/etc/pip-certificates.crt:ro"} \
        "${target[@]}" -f "$work/context/deploy/containers/$image.Containerfile" -t "localhost/$image" "$work/context" > /dev/null
    buildah push -q --format oci "localhost/$image" "oci:$layout:$image"
    umoci unpack --image "$layout:$image" "$work/unpacked"
    "$tools/bin/python" deploy/containers/sbom.py "$layout" "$image" "$work/unpacked/rootfs"
    rm -rf "$work/unpacked"
done
