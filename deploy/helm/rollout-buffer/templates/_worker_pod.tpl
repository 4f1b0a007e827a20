{{/* The pod of a pool. Its labels name no version, here and in the other pods: a new chart alone restarts nothing. dict root, pool, id */}}
{{- define "rb.workerPod" -}}
{{- $pool := .pool -}}
{{- $client := dict "root" .root "token" $pool.token -}}
{{- $holdsEngine := eq $pool.engine.source "launch" -}}
{{- $hasEngine := or $holdsEngine (eq $pool.engine.source "sidecar") -}}
{{- $hostNetwork := and $pool.collective.enabled $pool.collective.hostNetwork -}}
{{- $drain := get $pool.options "drain_grace_s" | default 20 | int -}}
metadata:
  labels: {{- include "rb.podLabels" (merge (dict "more" $pool.podLabels) .id) | nindent 4 }}
  {{- $annotations := deepCopy $pool.podAnnotations }}
  {{- with $pool.codeConfigMap }}
  {{- with lookup "v1" "ConfigMap" $.root.Release.Namespace . }}
  {{- /* Functions are imported once, so new ones start workers anew. Without a cluster nothing is known of them. */}}
  {{- $_ := set $annotations "checksum/code" (list .data .binaryData | toJson | sha256sum) }}
  {{- end }}
  {{- end }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "rb.pod" (dict "root" .root "scheduling" $pool) | nindent 2 }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pool.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if $hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    {{- include "rb.podSecurity" (dict "user" 10001) | nindent 4 }}
    {{- if and $pool.collective.enabled (not $hostNetwork) }}
    sysctls:
      - name: net.ipv4.ip_local_port_range
        value: {{ printf "%v %v" $pool.collective.portRange.from $pool.collective.portRange.to | quote }}
    {{- end }}
  terminationGracePeriodSeconds: {{ default (add $drain 40) $pool.terminationGracePeriodSeconds }}
  {{- if eq $pool.engine.source "sidecar" }}
  initContainers:
    {{- include "rb.sidecar" . | nindent 4 }}
  {{- end }}
  containers:
    # No preStop: nobody connects to a worker but for weights, and a worker that drains still serves them.
    - name: worker
      image: {{ include "rb.image" (dict "root" .root "image" $pool.image) }}
      imagePullPolicy: {{ $pool.image.pullPolicy }}
      {{- if $pool.codeConfigMap }}
      workingDir: /code
      {{- end }}
      args: {{- include "rb.workerArgs" . | nindent 8 }}
      env:
        - name: POD_NAME
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        - name: POD_IP
          valueFrom:
            fieldRef: {fieldPath: status.podIP}
        - {name: HOME, value: /tmp}
        - {name: RB_LOG_FORMAT, value: json}
        {{- include "rb.clientEnv" $client | nindent 8 }}
        {{- if and $pool.autoscaling.enabled (eq $pool.autoscaling.by "keda") $pool.token.secret }}
        # KEDA finds the token of its trigger here.
        - name: KEDA_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ $pool.token.secret }}, key: {{ $pool.token.key }}}
        {{- end }}
        {{- with include "rb.weightsEnv" .root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if $holdsEngine }}
        {{- with include "rb.engineEnv" . | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- end }}
        {{- with include "rb.tracingEnv" .root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "rb.extraEnv" (dict "env" $pool.extraEnv "instead" "options of the pool") | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- if or $pool.weights.servePort $pool.metricsPort }}
      ports:
        {{- if $pool.weights.servePort }}
        - {name: weights, containerPort: {{ $pool.weights.servePort }}}
        {{- end }}
        {{- if $pool.metricsPort }}
        - {name: metrics, containerPort: {{ $pool.metricsPort }}}
        {{- end }}
      {{- end }}
      {{- $resources := deepCopy $pool.resources }}
      {{- if eq $pool.weights.volume "emptyDir" }}
      {{- /* The scheduler does not look at the size of an emptyDir: weights would fill the disk of a node that is too small. */}}
      {{- $requests := merge (dict) (default dict $resources.requests) (dict "ephemeral-storage" $pool.weights.size) }}
      {{- $_ := set $resources "requests" $requests }}
      {{- end }}
      {{- if $holdsEngine }}
      resources: {{- include "rb.gpuResources" (dict "pool" $pool "resources" $resources) | nindent 8 }}
      {{- else }}
      resources: {{- toYaml $resources | nindent 8 }}
      {{- end }}
      securityContext: {{- include "rb.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        {{- include "rb.sharedMounts" $pool | nindent 8 }}
        - {name: tmp, mountPath: /tmp}
        {{- if $holdsEngine }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $pool.codeConfigMap }}
        - {name: code, mountPath: /code, readOnly: true}
        {{- end }}
        {{- with include "rb.clientMounts" $client | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "rb.weightsMounts" .root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if eq $pool.engine.source "sidecar" }}
    - name: engine-tmp
      emptyDir: {}
    {{- end }}
    {{- if $hasEngine }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.engine.shmSize }}}
    {{- end }}
    {{- if eq $pool.weights.volume "emptyDir" }}
    - name: weights
      emptyDir: {sizeLimit: {{ $pool.weights.size }}}
    {{- else if eq $pool.weights.volume "claim" }}
    - name: weights
      persistentVolumeClaim: {claimName: {{ $pool.weights.claim }}}
    {{- end }}
    {{- with $pool.models.claim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
    {{- end }}
    {{- with $pool.codeConfigMap }}
    - name: code
      configMap: {name: {{ . }}}
    {{- end }}
    {{- with include "rb.clientVolumes" $client | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with include "rb.weightsVolumes" .root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* A pod of an engine of several nodes beside the worker's: SGLang alone. dict root, pool */}}
{{- define "rb.nodePod" -}}
{{- $pool := .pool -}}
metadata:
  labels: {{- include "rb.podLabels" (dict "root" .root "component" "engine" "pool" $pool "more" $pool.podLabels) | nindent 4 }}
  {{- with $pool.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "rb.pod" (dict "root" .root "scheduling" $pool) | nindent 2 }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pool.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  securityContext: {{- include "rb.podSecurity" (dict "user" 10001) | nindent 4 }}
  containers:
    {{- include "rb.sidecar" (merge (dict "node" true) .) | nindent 4 }}
  volumes:
    - name: engine-tmp
      emptyDir: {}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.engine.shmSize }}}
    - name: weights
      persistentVolumeClaim: {claimName: {{ $pool.weights.claim }}}
    {{- with $pool.models.claim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
    {{- end }}
    {{- with $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
