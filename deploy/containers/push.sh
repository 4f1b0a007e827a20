#!/usr/bin/env bash
# Pushes the images of a layout, each with its bill of materials, to a registry: REPOSITORY/service:VERSION and so on.
# usage: push.sh LAYOUT REPOSITORY [TAG]   (TAG: default the version; skopeo login, or its configuration, lets one in)
# environment: PUSH_ARGS  further options of `skopeo copy`
set -euo pipefail
layout=${1:?usage: push.sh LAYOUT REPOSITORY [TAG]} repository=${2:?usage: push.sh LAYOUT REPOSITORY [TAG]}

for name in $(python3 -c '
import json, sys
for each in json.load(open(sys.argv[1]))["manifests"]:
    print(each["annotations"]["org.opencontainers.image.ref.name"])' "$layout/index.json"); do
    image=${name%-sbom}
    tag=${3:-$(skopeo inspect --config "oci:$layout:$image" |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["config"]["Labels"]["org.opencontainers.image.version"])')}
    # shellcheck disable=SC2086  # several options
    skopeo copy --preserve-digests ${PUSH_ARGS:-} "oci:$layout:$name" "docker://$repository/$image:$tag${name#"$image"}"
done
