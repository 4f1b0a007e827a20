{{/* Names, labels, and pieces that several objects share. A template named x takes the root context unless it says otherwise. */}}

{{- define "rb.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "rb.storeName" -}}
{{ include "rb.fullname" . }}-store
{{- end -}}

{{/* dict root, pool */}}
{{- define "rb.poolName" -}}
{{ include "rb.fullname" .root }}-{{ .pool.name }}
{{- end -}}

{{/* What never changes: selectors. dict root, component; pool for workers. */}}
{{- define "rb.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
rollout-buffer/pool: {{ .name }}
{{- end }}
{{- end -}}

{{- define "rb.labels" -}}
{{ include "rb.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods. What rb.selector takes, and more: further labels. */}}
{{- define "rb.podLabels" -}}
{{ include "rb.selector" . }}
{{- $more := merge (dict) (default dict .more) .root.Values.commonLabels }}
{{- range $name, $_ := $more }}
{{- if or (hasPrefix "app.kubernetes.io/" $name) (eq $name "rollout-buffer/pool") (eq $name "helm.sh/chart") }}
{{- fail (printf "labels: %s is the chart's own" $name) }}
{{- end }}
{{- end }}
{{- with $more }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rb.serviceAccountName" -}}
{{- default (ternary (include "rb.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* dict root, image */}}
{{- define "rb.image" -}}
{{- if eq .image.tag "latest" -}}
{{- fail (printf "image %s: the tag latest moves under running pods; name a version" .image.repository) -}}
{{- end -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end -}}

{{/*
spec.replicas of what may have an autoscaler. dict root, kind, name, replicas, autoscaling; apiVersion where it is not apps/v1

With one, it is the number that the object has in the cluster. To leave it out would be wrong there: Helm removes a field
that the release had before, Kubernetes makes 1 of that, and turning the autoscaler on (or a rollback) would end all pods
but one. Where nothing can be looked up (helm template, and tools that render by it) it is left out: any number would be
applied at every sync, against the autoscaler. Every namespace has the ConfigMap kube-root-ca.crt.
*/}}
{{- define "rb.replicas" -}}
{{- if not .autoscaling.enabled -}}
replicas: {{ .replicas }}
{{- else -}}
{{- $namespace := .root.Release.Namespace -}}
{{- $object := lookup (default "apps/v1" .apiVersion) .kind $namespace .name -}}
{{- if $object -}}
replicas: {{ $object.spec.replicas }}
{{- else if lookup "v1" "ConfigMap" $namespace "kube-root-ca.crt" -}}
replicas: {{ .autoscaling.minReplicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A value as a program reads it. Helm's numbers are floats: 64 MiB would be printed as 6.7108864e+07. */}}
{{- define "rb.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ printf "%.0f" . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* Further environment variables. dict env, instead (where RB_* belong) */}}
{{- define "rb.extraEnv" -}}
{{- range .env }}
{{- if hasPrefix "RB_" .name }}
{{- fail (printf "extraEnv: %s has a place of its own, %s" .name $.instead) }}
{{- end }}
{{- end }}
{{- with .env }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/* Where traces go, and of which groups: environment of service and workers. OpenTelemetry's own names. */}}
{{- define "rb.tracingEnv" -}}
{{- with .Values.tracing }}
{{- if .endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: OTEL_EXPORTER_OTLP_PROTOCOL, value: {{ .protocol | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ include "rb.text" .ratio | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Start of every pod's spec. dict root, scheduling (values with nodeSelector, tolerations, affinity) */}}
{{- define "rb.pod" -}}
serviceAccountName: {{ include "rb.serviceAccountName" .root }}
automountServiceAccountToken: false
# The variables of Services would collide with settings: a Service named rb gives RB_PORT.
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .scheduling }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A pod's securityContext. dict user */}}
{{- define "rb.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "rb.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Pods of a set on different nodes and zones where possible. dict id (what rb.selector takes); nodes if so many have to be there. */}}
{{- define "rb.spread" -}}
{{- $nodes := .nodes -}}
{{- $labels := include "rb.selector" .id -}}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- topologyKey: {{ . }}
  maxSkew: 1
  {{- if and $nodes (eq . "kubernetes.io/hostname") }}
  whenUnsatisfiable: DoNotSchedule
  minDomains: {{ $nodes }}
  # Nodes that do not take these pods are not counted as empty ones.
  nodeTaintsPolicy: Honor
  {{- else }}
  whenUnsatisfiable: ScheduleAnyway
  {{- end }}
  labelSelector:
    matchLabels: {{- $labels | nindent 6 }}
{{- end }}
{{- end -}}
