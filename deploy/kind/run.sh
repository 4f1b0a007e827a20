#!/usr/bin/env bash
# Installs the chart into a kind cluster and looks whether it works: images, install, helm test, loss of the store's
# primary, upgrade. For CI that has a container runtime; it was not run where it was written. See README.md.
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
kube wait --for=jsonpath='{.status.readyReplicas}'=2 "statefulset/$RELEASE-rollout-buffer-sim" --timeout=120s

echo "kind: the store's first server is lost"
kube delete pod "$RELEASE-rollout-buffer-store-0" --grace-period=0 --force
kube rollout status "statefulset/$RELEASE-rollout-buffer-store" --timeout=180s
kube wait --for=condition=Available "$service" --timeout=120s
kube exec "$service" -- rollout-buffer run show kind > /dev/null

echo "kind: an upgrade replaces the service without a gap"
install --reuse-values --set service.podAnnotations.upgraded=yes --wait --timeout 10m
kube exec "$service" -- rollout-buffer run show kind

echo "kind: passed"
