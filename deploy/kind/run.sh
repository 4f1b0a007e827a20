#!/usr/bin/env bash
# Installs the chart into a kind cluster and looks whether it works: images, install, helm test, engines, loss of the
# store's primary, upgrade. For CI that has a container runtime; it was not run where it was written. See README.md.
# usage: deploy/kind/run.sh   (from the repository; ENGINE=podman for Podman, KEEP=1 keeps the cluster)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

ENGINE=${ENGINE:-docker}
CLUSTER=${CLUSTER:-rollout-buffer}
RELEASE=kind
NAMESPACE=rollout
CHART=deploy/helm/rollout-buffer
[ "$ENGINE" = docker ] || export KIND_EXPERIMENTAL_PROVIDER=$ENGINE

for program in "$ENGINE" kind kubectl helm; do
    command -v "$program" > /dev/null || { echo "kind: $program is missing" >&2; exit 1; }
done

kube() { kubectl --context "kind-$CLUSTER" --namespace "$NAMESPACE" "$@"; }
install() { helm --kube-context "kind-$CLUSTER" upgrade --install "$RELEASE" "$CHART" --namespace "$NAMESPACE" "$@"; }

# until_true SECONDS WHAT COMMAND...: repeats the command every 2 s until it succeeds.
until_true() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            echo "kind: not in time: $what" >&2
            return 1
        fi
        sleep 2
    done
}

# The pod of the primary, by the Sentinel in a pod of the store.
primary_by() {
    kube exec "$1" --container sentinel -- \
        valkey-cli -p 26379 --raw sentinel get-master-addr-by-name rollout-buffer | sed -n '1s/\..*//p'
}

finish() {
    local status=$?
    if [ "$status" -ne 0 ]; then
        kube get pods --output wide || true
        kube get events --sort-by=.lastTimestamp | tail -n 30 || true
        kube logs --selector app.kubernetes.io/instance="$RELEASE" --all-containers --prefix --tail 40 || true
    fi
    [ -n "${KEEP:-}" ] || kind delete cluster --name "$CLUSTER"
    exit "$status"
}

echo "kind: building the images"
"$ENGINE" build -q -f deploy/containers/service.Containerfile -t localhost/rollout-buffer/service:kind .
"$ENGINE" build -q -f deploy/containers/worker.Containerfile --target worker -t localhost/rollout-buffer/worker:kind .

echo "kind: making the cluster"
kind create cluster --name "$CLUSTER" --config deploy/kind/cluster.yaml --wait 180s
trap finish EXIT
archive=$(mktemp)
for image in service worker; do
    "$ENGINE" save -o "$archive" "localhost/rollout-buffer/$image:kind"
    kind load image-archive "$archive" --name "$CLUSTER"
done
rm -f "$archive"

echo "kind: installing"
kubectl --context "kind-$CLUSTER" create namespace "$NAMESPACE"
kube create configmap rewards --from-file deploy/kind/rewards.py
install --values deploy/kind/values.yaml --wait --timeout 10m

echo "kind: helm test"
helm --kube-context "kind-$CLUSTER" test "$RELEASE" --namespace "$NAMESPACE" --logs

echo "kind: a run, and simulated workers for it"
service=deployment/$RELEASE-rollout-buffer
kube exec "$service" -- rollout-buffer run create kind --preset one_step_off
# Two workers with two engines each. Pods of workers are ready before they have reached the service.
engines_report() {
    [ "$(kube exec "$service" -- rollout-buffer status --run kind --json | grep -c '"engine_id"')" -eq 4 ]
}
until_true 180 "four engines in rollout-buffer status --run kind" engines_report

echo "kind: the store's primary is lost"
store=$RELEASE-rollout-buffer-store
primary=$(primary_by "$store-0")
witness=$store-0
[ "$primary" != "$witness" ] || witness=$store-1
promoted() {
    local now
    now=$(primary_by "$witness") && [ -n "$now" ] && [ "$now" != "$primary" ]
}
run_is_there() { kube exec "$service" -- rollout-buffer run show kind > /dev/null; }
# Without its node the pod cannot come back: one that is back before the Sentinels give it up remains primary.
cordoned=$(kube get pod "$primary" --output jsonpath='{.spec.nodeName}')
kubectl --context "kind-$CLUSTER" cordon "$cordoned"
kube delete pod "$primary" --grace-period=0 --force
until_true 120 "another primary than $primary, by the Sentinel of $witness" promoted
echo "kind: $primary was primary, $(primary_by "$witness") is"
until_true 60 "the run after the failover" run_is_there
kubectl --context "kind-$CLUSTER" uncordon "$cordoned"
kube rollout status "statefulset/$store" --timeout=180s

echo "kind: an upgrade replaces the service without a gap"
install --reuse-values --set service.podAnnotations.upgraded=yes --wait --timeout 10m
kube exec "$service" -- rollout-buffer run show kind
kube exec "$service" -- python -c "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/readyz').read())"

echo "kind: passed"
