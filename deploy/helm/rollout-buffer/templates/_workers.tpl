{{/* Pools: an entry of workers, laid over workerDefaults, and the pieces of its pods. */}}

{{/* The pools as YAML: a map by name. */}}
{{- define "rb.pools" -}}
{{- $pools := dict -}}
{{- range .Values.workers -}}
{{- if hasKey $pools .name -}}{{- fail (printf "workers: two pools have the name %s" .name) -}}{{- end -}}
{{- if has .name (list "store" "shards" "client" "test" "relay") -}}{{- fail (printf "workers: the name %s is taken by the chart" .name) -}}{{- end -}}
{{- $pool := mustMergeOverwrite (deepCopy $.Values.workerDefaults) (deepCopy .) -}}
{{- $_ := set $pools .name $pool -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{/* Refuses what the schema cannot. dict root, pool */}}
{{- define "rb.checkPool" -}}
{{- $pool := .pool -}}
{{- $engine := $pool.engine -}}
{{- $where := printf "workers (%s)" $pool.name -}}
{{- if and (eq $engine.source "sidecar") (not $engine.sidecar.model) -}}
{{- fail (printf "%s: engine.sidecar.model: name the model that SGLang serves" $where) -}}
{{- else if and (eq $engine.source "urls") (not $engine.urls) -}}
{{- fail (printf "%s: engine.urls: name the SGLang servers" $where) -}}
{{- else if and (eq $engine.source "router") (not $engine.router) -}}
{{- fail (printf "%s: engine.router: name the sglang-router" $where) -}}
{{- else if and (eq $engine.source "launch") (not (hasKey $engine.launch "model_path")) -}}
{{- fail (printf "%s: engine.launch.model_path: name the model's directory" $where) -}}
{{- end -}}
{{- if eq $engine.source "launch" -}}
{{- include "rb.checkLaunch" (dict "pool" $pool "where" $where) -}}
{{- end -}}
{{- if and (has $engine.source (list "urls" "router")) (or (gt (int $pool.replicas) 1) $pool.autoscaling.enabled) -}}
{{- fail (printf "%s: a server has one worker: with engine.source=%s replicas has to be 1; divide the servers over pools instead" $where $engine.source) -}}
{{- end -}}
{{- if ne (eq $pool.kind "LeaderWorkerSet") (gt (int $engine.nodes) 1) -}}
{{- fail (printf "%s: engine.nodes: an engine of several nodes takes kind=LeaderWorkerSet, and that takes two nodes or more" $where) -}}
{{- else if and (eq $pool.kind "LeaderWorkerSet") (ne $engine.source "sidecar") -}}
{{- fail (printf "%s: engine.source: only a sidecar may run on several nodes, not %s" $where $engine.source) -}}
{{- else if and (eq $pool.kind "LeaderWorkerSet") (ne $pool.weights.volume "claim") -}}
{{- fail (printf "%s: weights.volume: every node of an engine reads the weights that its worker has fetched, so it has to be a claim that all mount" $where) -}}
{{- end -}}
{{- if and (eq $pool.weights.volume "claim") (not $pool.weights.claim) -}}
{{- fail (printf "%s: weights.claim: name the PersistentVolumeClaim" $where) -}}
{{- else if and (eq $pool.weights.volume "template") (ne $pool.kind "StatefulSet") -}}
{{- fail (printf "%s: weights.volume=template needs kind=StatefulSet" $where) -}}
{{- end -}}
{{- if not (or $pool.options.reward $pool.options.rollout $pool.options.environment) -}}
{{- fail (printf "%s: options: give reward, rollout or environment (module:function)" $where) -}}
{{- end -}}
{{- if and .root.Values.security.tokens.secret (not $pool.token.secret) -}}
{{- fail (printf "%s: token.secret: the service asks for tokens; name the Secret with this worker's" $where) -}}
{{- end -}}
{{- if and $pool.collective.enabled $pool.collective.hostNetwork .root.Values.networkPolicy.enabled -}}
{{- $blocks := list -}}
{{- range .root.Values.networkPolicy.trainers -}}{{- if .ipBlock -}}{{- $blocks = append $blocks .ipBlock -}}{{- end -}}{{- end -}}
{{- if not $blocks -}}
{{- fail (printf "%s: collective.hostNetwork: such workers come from the addresses of nodes, which no selector matches; name these as an ipBlock in networkPolicy.trainers" $where) -}}
{{- end -}}
{{- end -}}
{{- if and $pool.collective.enabled (gt (int $pool.collective.portRange.from) (int $pool.collective.portRange.to)) -}}
{{- fail (printf "%s: collective.portRange: from is above to" $where) -}}
{{- end -}}
{{- if and .root.Values.security.weights.token.secret $pool.weights.servePort (not .root.Values.security.insecure) -}}
{{- fail (printf "%s: weights.servePort: with security.weights.token weights are read over https alone, and pods have no certificate; take a relay" $where) -}}
{{- end -}}
{{- $name := include "rb.poolName" . -}}
{{- if and (eq $pool.kind "StatefulSet") (gt (len $name) 52) -}}
{{- fail (printf "%s: name: the StatefulSet %s has %d characters; its pods carry it with a hash as a label, which leaves 52" $where $name (len $name)) -}}
{{- end -}}
{{- include "rb.checkPorts" (dict "pool" $pool "where" $where) -}}
{{- end -}}

{{/* Refuses what would be killed for memory, and GPUs that cannot be divided. dict pool, where */}}
{{- define "rb.checkLaunch" -}}
{{- $engine := .pool.engine -}}
{{- $memory := get (default dict .pool.resources.limits) "memory" -}}
{{- if $memory -}}
{{- if le (include "rb.bytes" $memory | float64) (include "rb.bytes" $engine.shmSize | float64) -}}
{{- fail (printf "%s: resources.limits.memory: %v is no more than engine.shmSize (%s), which counts against it; SGLang runs in the worker's container and needs room beside it" .where $memory $engine.shmSize) -}}
{{- end -}}
{{- end -}}
{{- $engines := int (get $engine.launch "engines" | default 1) -}}
{{- if and $engine.gpus (mod (int $engine.gpus) $engines) -}}
{{- fail (printf "%s: engine.gpus: %v cannot be divided among engine.launch.engines (%d)" .where $engine.gpus $engines) -}}
{{- end -}}
{{- end -}}

{{/* A quantity of Kubernetes as a number. */}}
{{- define "rb.bytes" -}}
{{- $text := include "rb.text" . -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (get $units (regexFind "[A-Za-z]*$" $text) | default 1.0) -}}
{{- end -}}

{{/* Refuses two listeners of a pod at one port. dict pool, where */}}
{{- define "rb.checkPorts" -}}
{{- $pool := .pool -}}
{{- $where := .where -}}
{{- $range := $pool.collective.portRange -}}
{{- $ports := dict -}}
{{- if $pool.weights.servePort -}}{{- $_ := set $ports "weights.servePort" (int $pool.weights.servePort) -}}{{- end -}}
{{- if $pool.metricsPort -}}{{- $_ := set $ports "metricsPort" (int $pool.metricsPort) -}}{{- end -}}
{{- if eq $pool.engine.source "sidecar" -}}{{- $_ := set $ports "engine.sidecar.port" (int $pool.engine.sidecar.port) -}}{{- end -}}
{{- if gt (len $ports) (values $ports | uniq | len) -}}
{{- $said := list -}}
{{- range $value, $port := $ports -}}{{- $said = append $said (printf "%s %d" $value $port) -}}{{- end -}}
{{- fail (printf "%s: two listeners at one port: %s" $where (join ", " $said)) -}}
{{- end -}}
{{- if and $pool.collective.enabled (not $pool.collective.hostNetwork) -}}
{{- range $value, $port := $ports -}}
{{- if and (ge $port (int $range.from)) (le $port (int $range.to)) -}}
{{- fail (printf "%s: %s: %d lies in collective.portRange, whose ports connections take at any time" $where $value $port) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Options of the command line by their names in Python. The map. */}}
{{- define "rb.flags" -}}
{{- range $name, $value := . }}
{{- $flag := replace "_" "-" $name }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $flag }}
{{- else }}
- {{ printf "--%s=%s" $flag (include "rb.text" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* dict root, pool */}}
{{- define "rb.workerArgs" -}}
{{- $pool := .pool -}}
{{- $engine := $pool.engine -}}
- worker
- {{ printf "--run=%s" $pool.run | quote }}
- --worker-id=$(POD_NAME)
- --weights-dir={{ $pool.weights.mountPath }}
{{- if $pool.weights.servePort }}
- {{ printf "--weights-serve=%s:%v" .root.Values.service.bind $pool.weights.servePort | quote }}
- --weights-advertise=$(POD_IP)
{{- end }}
{{- if $pool.metricsPort }}
- {{ printf "--metrics-listen=%s:%v" .root.Values.service.bind $pool.metricsPort | quote }}
{{- end }}
{{- if .root.Values.relay.enabled }}
- --weights-mirror={{ include "rb.relayUrl" .root }}
{{- end }}
{{- range $pool.weights.mirrors }}
- {{ printf "--weights-mirror=%s" . | quote }}
{{- end }}
{{- if eq $engine.source "sidecar" }}
- --engine=http://127.0.0.1:{{ $engine.sidecar.port }}
{{- if not (hasKey $pool.options "engine_timeout_s") }}
- --engine-timeout-s={{ $engine.sidecar.startupSeconds }}
{{- end }}
{{- else if eq $engine.source "urls" }}
{{- range $engine.urls }}
- {{ printf "--engine=%s" . | quote }}
{{- end }}
{{- else if eq $engine.source "router" }}
- {{ printf "--router=%s" $engine.router | quote }}
{{- else if eq $engine.source "launch" }}
- {{ printf "--launch=%s" $engine.launch.model_path | quote }}
{{- include "rb.flags" (include "rb.launch" $engine | fromYaml) }}
{{- range $engine.launch.extra_flags }}
- {{ printf "--engine-flag=%s" . | quote }}
{{- end }}
{{- if include "rb.engineMetrics" . }}
- --engine-flag=--enable-metrics
{{- end }}
{{- else }}
- --simulate
{{- include "rb.flags" $engine.simulate }}
{{- end }}
{{- include "rb.flags" $pool.options }}
{{- end -}}

{{/* Numbers of the engines whose own metrics the pool's workers pass on, one a line. dict root, pool */}}
{{- define "rb.engineMetrics" -}}
{{- if and .root.Values.metrics.podMonitor.enabled .pool.metricsPort -}}
{{- if eq .pool.engine.source "sidecar" -}}0
{{- else if eq .pool.engine.source "launch" -}}
{{- until (int (get .pool.engine.launch "engines" | default 1)) | join "\n" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Options of launched servers, without model_path and extra_flags. The pool's engine. */}}
{{- define "rb.launch" -}}
{{- $engines := int (get .launch "engines" | default 1) -}}
{{/* SGLang's own environment in the image worker-sglang; the worker's comes first on PATH. */}}
{{- $given := dict "sglang_python" "/usr/bin/python3" -}}
{{- if and .gpus (ne (get .launch "device") "cpu") -}}
{{- $_ := set $given "device" "cuda" -}}
{{- if gt $engines 1 -}}{{- $_ := set $given "gpus_per_engine" (div .gpus $engines) -}}{{- end -}}
{{- end -}}
{{- mergeOverwrite $given (omit .launch "model_path" "extra_flags") | toYaml -}}
{{- end -}}

{{/* Environment of the process that holds the engine. dict root, pool */}}
{{- define "rb.engineEnv" -}}
{{- with .pool.collective }}
{{- if and .enabled .interface }}
- {name: NCCL_SOCKET_IFNAME, value: {{ .interface | quote }}}
- {name: GLOO_SOCKET_IFNAME, value: {{ .interface | quote }}}
{{- end }}
{{- end }}
{{- with .pool.engine.env }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{/* Mounts of the worker and of its engine: both see models and weights under the same paths. The pool. */}}
{{- define "rb.sharedMounts" -}}
- {name: weights, mountPath: {{ .weights.mountPath }}}
{{- if .models.claim }}
- {name: models, mountPath: {{ .models.mountPath }}, readOnly: true}
{{- end }}
{{- with .extraVolumeMounts }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{/* The SGLang container: it starts before the worker and ends after it, so that a worker that drains still has it. dict root, pool */}}
{{- define "rb.sidecar" -}}
{{- $pool := .pool -}}
{{- $sidecar := $pool.engine.sidecar -}}
{{- $probe := printf "import urllib.request as u; u.urlopen('http://127.0.0.1:%v/ready', timeout=4)" $sidecar.port -}}
- name: engine
  image: {{ include "rb.image" (dict "root" .root "image" $sidecar.image) }}
  imagePullPolicy: {{ $sidecar.image.pullPolicy }}
  {{- if not .node }}
  restartPolicy: Always
  {{- end }}
  command: [python3, -m, sglang.launch_server]
  args:
    - {{ printf "--model-path=%s" $sidecar.model | quote }}
    - --host=127.0.0.1
    - --port={{ $sidecar.port }}
    - --incremental-streaming-output
    {{- if include "rb.engineMetrics" . }}
    - --enable-metrics
    {{- end }}
    {{- include "rb.nodeArgs" (dict "pool" $pool "rank" (ternary "$(LWS_WORKER_INDEX)" "0" (default false .node))) | nindent 4 }}
    {{- range $sidecar.args }}
    - {{ . | quote }}
    {{- end }}
  env:
    # Compiled kernels and downloads; the root file system is read-only.
    - {name: HOME, value: /tmp}
    # The image knows no user 10001, and torch names its cache of kernels after the user.
    - {name: LOGNAME, value: engine}
    {{- with include "rb.engineEnv" . | trim }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- if not .node }}
  # Not /health: it generates a token, and fails while the server is paused for new weights. No liveness probe: the worker
  # leaves a server that hangs alone until it answers, and one that has ended is started again.
  startupProbe:
    exec: {command: [python3, -c, {{ $probe | quote }}]}
    periodSeconds: 5
    timeoutSeconds: 10
    failureThreshold: {{ div $sidecar.startupSeconds 5 | max 1 }}
  {{- end }}
  resources: {{- include "rb.gpuResources" (dict "pool" $pool "resources" $sidecar.resources) | nindent 4 }}
  securityContext: {{- toYaml (default (include "rb.containerSecurity" .root | fromYaml) $sidecar.securityContext) | nindent 4 }}
  volumeMounts:
    {{- include "rb.sharedMounts" $pool | nindent 4 }}
    - {name: engine-tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
{{- end -}}

{{/* Flags of SGLang on several nodes; LeaderWorkerSet says who leads. dict pool, rank */}}
{{- define "rb.nodeArgs" -}}
{{- if gt (int .pool.engine.nodes) 1 -}}
- --nnodes={{ .pool.engine.nodes }}
- --node-rank={{ .rank }}
- --dist-init-addr=$(LWS_LEADER_ADDRESS):{{ .pool.engine.nodesPort }}
{{- end -}}
{{- end -}}

{{/* Resources of the container with the engine. dict pool, resources */}}
{{- define "rb.gpuResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .pool.engine.gpus -}}
{{- $gpus := dict .pool.engine.gpuResource (int .pool.engine.gpus) -}}
{{- $_ := set $resources "limits" (merge (dict) (default dict $resources.limits) $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
