{{/* The cluster that the chart makes, as the store or for payloads. */}}

{{/* Whether there is one; nothing where there is none. */}}
{{- define "rb.shards" -}}
{{- with .Values.store -}}{{- if or (eq .mode "cluster") .payloads.bundled -}}true{{- end -}}{{- end -}}
{{- end -}}

{{- define "rb.shardsName" -}}
{{ include "rb.fullname" . }}-shards
{{- end -}}

{{/* How many servers it has. */}}
{{- define "rb.shardsServers" -}}
{{- with .Values.store.cluster -}}{{ mul .shards (add 1 .replicas) }}{{- end -}}
{{- end -}}

{{/* Their host names in order, separated by blanks. */}}
{{- define "rb.shardsHosts" -}}
{{- $root := . -}}
{{- $name := include "rb.shardsName" . -}}
{{- range $i, $_ := until (include "rb.shardsServers" . | int) -}}
{{- if $i }} {{ end -}}
{{ $name }}-{{ $i }}.{{ $name }}.{{ $root.Release.Namespace }}.svc
{{- end -}}
{{- end -}}

{{- define "rb.shardsUrl" -}}
redis+cluster://{{ include "rb.storeUser" . }}{{ include "rb.shardsHosts" . | replace " " ":6379," }}:6379
{{- end -}}

{{/* Shell command of a server's readiness: it serves with the others, as a primary or in step with one. */}}
{{- define "rb.shardsReady" -}}
{{- if .Values.store.auth.secret }}export REDISCLI_AUTH=$STORE_PASSWORD; {{ end -}}
valkey-cli cluster info | grep -q cluster_state:ok && valkey-cli info replication | grep -qE '^(role:master|master_link_status:up)'
{{- end -}}

{{/* Environment of files/store/run.sh in mode cluster, and of form.sh. */}}
{{- define "rb.shardsEnv" -}}
{{- $cluster := .Values.store.cluster -}}
{{- with include "rb.storePasswordEnv" . }}
{{- . }}
{{ end -}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- name: ADDRESS
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
- name: SELF
  value: $(POD_NAME).{{ include "rb.shardsName" . }}.{{ .Release.Namespace }}.svc
- name: HOSTS
  value: {{ include "rb.shardsHosts" . }}
- name: SHARDS
  value: {{ include "rb.text" $cluster.shards | quote }}
- name: NODE_TIMEOUT_MS
  value: {{ include "rb.text" $cluster.nodeTimeoutMs | quote }}
- name: REPL_BACKLOG
  value: {{ $cluster.replicationBacklog }}
- name: REPLICA_BUFFER_LIMIT
  value: {{ $cluster.replicaBufferLimit }}
- name: APPENDFSYNC
  value: {{ ternary "always" "\"no\"" (eq .Values.store.durability "host") }}
- name: MAXMEMORY
  value: {{ $cluster.maxmemory | quote }}
{{- end -}}
