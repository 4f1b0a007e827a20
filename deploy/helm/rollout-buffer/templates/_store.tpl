{{/* The address of the store, as environment variables. */}}

{{- define "rb.storeEnv" -}}
{{- $store := .Values.store -}}
{{- if or $store.backup.enabled $store.backup.restore -}}
{{- if not (has $store.mode (list "single" "sentinel")) -}}
{{- fail (printf "store.backup: is of the bundled store in modes single and sentinel, not of mode %s" $store.mode) -}}
{{- end -}}
{{- $_ := required "store.backup.claim: name the PersistentVolumeClaim of the snapshots" $store.backup.claim -}}
{{- end -}}
{{- if or (ne $store.mode "external") (include "rb.shards" .) -}}
{{- include "rb.storePasswordEnv" . }}
{{ end -}}
{{- if eq $store.mode "external" -}}
{{- if and $store.external.url $store.external.secret -}}
{{- fail "store.external: give url or secret, not both" -}}
{{- end -}}
- name: RB_STORE
{{- if $store.external.secret }}
  valueFrom:
    secretKeyRef: {name: {{ $store.external.secret }}, key: {{ $store.external.key }}}
{{- else }}
  value: {{ required "store.external: mode external needs url, or secret with the URL" $store.external.url | quote }}
{{- end }}
{{- else -}}
- name: RB_STORE
  value: {{ include "rb.storeUrl" . | quote }}
{{- end }}
{{- if and (include "rb.runsSpread" .) (include "rb.payloadsApart" .) -}}
{{- fail "store.payloads: the store is a cluster, so payloads lie there too; leave it out" -}}
{{- end -}}
{{- if and $store.payloads.url $store.payloads.secret -}}
{{- fail "store.payloads: give url or secret, not both" -}}
{{- end }}
{{- if and $store.payloads.bundled (or $store.payloads.url $store.payloads.secret) -}}
{{- fail "store.payloads.bundled: the chart makes the cluster; leave url and secret out, or bundled" -}}
{{- end }}
{{- if $store.payloads.secret }}
- name: RB_PAYLOAD_STORE
  valueFrom:
    secretKeyRef: {name: {{ $store.payloads.secret }}, key: {{ $store.payloads.key }}}
{{- else if $store.payloads.url }}
- name: RB_PAYLOAD_STORE
  value: {{ $store.payloads.url | quote }}
{{- else if $store.payloads.bundled }}
- name: RB_PAYLOAD_STORE
  value: {{ include "rb.shardsUrl" . | quote }}
{{- end }}
{{- if include "rb.storeCa" . }}
- name: RB_STORE_CA
  value: /etc/rollout-buffer/store-ca/ca.crt
{{- end }}
{{- end -}}

{{/* Whether runs lie on a cluster, as far as a url says; nothing where they do not. */}}
{{- define "rb.runsSpread" -}}
{{- with .Values.store -}}
{{- if or (eq .mode "cluster") (and (eq .mode "external") (contains "+cluster://" .external.url)) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* The values external and payloads of the store, as far as they are used, by their names. */}}
{{- define "rb.servers" -}}
{{- $servers := dict -}}
{{- if eq .Values.store.mode "external" -}}{{- $servers = set $servers "external" .Values.store.external -}}{{- end -}}
{{- if include "rb.payloadsApart" . -}}{{- $servers = set $servers "payloads" .Values.store.payloads -}}{{- end -}}
{{- toYaml $servers -}}
{{- end -}}

{{/* Whether payloads lie on a cluster of their own; nothing where they do not. */}}
{{- define "rb.payloadsApart" -}}
{{- with .Values.store.payloads -}}{{- if or .url .secret .bundled -}}true{{- end -}}{{- end -}}
{{- end -}}

{{/* The Secret and key with the authorities of servers with TLS, as YAML; nothing without one. */}}
{{- define "rb.storeCa" -}}
{{- $found := dict -}}
{{- range $name, $server := include "rb.servers" . | fromYaml -}}
{{- if $server.ca.secret -}}
{{- if and $server.url (not (regexMatch "^(rediss|valkeys)" $server.url)) -}}
{{- fail (printf "store.%s.ca: the store's url has no TLS; begin it with rediss" $name) -}}
{{- end -}}
{{- if and $found (ne (toJson $found) (toJson $server.ca)) -}}
{{- fail "store.external.ca and store.payloads.ca: one file has the authorities of both; name the same" -}}
{{- end -}}
{{- $found = $server.ca -}}
{{- end -}}
{{- end -}}
{{- if $found -}}{{- toYaml $found -}}{{- end -}}
{{- end -}}

{{/* Whether clients are let at the store, and by which address. */}}
{{- define "rb.directEnv" -}}
{{- $direct := .Values.service.directPayloads -}}
{{- $store := .Values.store -}}
{{- $apart := include "rb.payloadsApart" . -}}
{{- $bundled := or (include "rb.shards" .) (and (ne $store.mode "external") (not $apart)) -}}
{{- if not $direct.enabled }}
- name: RB_DIRECT_PAYLOADS
  value: "false"
{{- else }}
{{- if and $bundled (not $store.auth.secret) -}}
{{- fail "service.directPayloads: workers and trainers would reach a store that asks nobody for a password; name its Secret in store.auth.secret" -}}
{{- end -}}
{{- if and $bundled $direct.users.secret -}}
{{- fail "service.directPayloads.users: is for an external store; on the bundled one the service makes users itself" -}}
{{- end -}}
{{- if and (or $apart (include "rb.runsSpread" .)) $direct.address -}}
{{- fail "service.directPayloads.address: is of one server; a cluster names its own addresses" -}}
{{- end -}}
{{- $url := ternary $store.payloads.url $store.external.url (ne $apart "") -}}
{{- $plain := or $bundled (and $url (not (regexMatch "^(rediss|valkeys)" $url))) -}}
{{- if and $plain (include "rb.tlsOn" .) (not $direct.plainText) -}}
{{- fail "service.directPayloads: the service has TLS and the store has none; set service.directPayloads.plainText=true to accept that, or use an external rediss:// store" -}}
{{- end -}}
{{- if $direct.plainText }}
- name: RB_DIRECT_PAYLOADS
  value: "true"
{{- end }}
{{- with $direct.address }}
- name: RB_PAYLOAD_ADDRESS
  value: {{ . | quote }}
{{- end }}
{{- with $direct.users }}
{{- if .secret }}
- name: RB_PAYLOAD_WRITER
  valueFrom:
    secretKeyRef: {name: {{ .secret }}, key: {{ .writerKey }}}
- name: RB_PAYLOAD_READER
  valueFrom:
    secretKeyRef: {name: {{ .secret }}, key: {{ .readerKey }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "rb.storePasswordEnv" -}}
{{- with .Values.store.auth -}}
{{- if .secret -}}
- name: STORE_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a URL of a bundled server has before the host. */}}
{{- define "rb.storeUser" -}}
{{- if .Values.store.auth.secret -}}:$(STORE_PASSWORD)@{{- end -}}
{{- end -}}

{{/* Of the bundled store; Kubernetes puts the password in. */}}
{{- define "rb.storeUrl" -}}
{{- $store := .Values.store -}}
{{- $user := include "rb.storeUser" . -}}
{{- if eq $store.mode "cluster" -}}
{{ include "rb.shardsUrl" . }}
{{- else if eq $store.mode "sentinel" -}}
redis+sentinel://{{ $user }}{{ include "rb.storeHosts" . | replace " " ":26379," }}:26379/{{ $store.sentinel.service }}/0
{{- if $store.auth.secret }}?sentinel_password=$(STORE_PASSWORD){{ end -}}
{{- else -}}
redis://{{ $user }}{{ include "rb.storeName" . }}.{{ .Release.Namespace }}.svc:6379/0
{{- end -}}
{{- end -}}

{{/* Host names of the servers of mode sentinel, the first one first, separated by blanks. */}}
{{- define "rb.storeHosts" -}}
{{- $root := . -}}
{{- $name := include "rb.storeName" . -}}
{{- range $i, $_ := until (int .Values.store.sentinel.replicas) -}}
{{- if $i }} {{ end -}}
{{ $name }}-{{ $i }}.{{ $name }}.{{ $root.Release.Namespace }}.svc
{{- end -}}
{{- end -}}

{{/* Shell command of the server's readiness. */}}
{{- define "rb.storeReady" -}}
{{- if .Values.store.auth.secret }}export REDISCLI_AUTH=$STORE_PASSWORD; {{ end -}}
valkey-cli ping | grep -q PONG
{{- if eq .Values.store.mode "sentinel" }} && valkey-cli info replication | grep -qE '^(role:master|master_link_status:up)'{{ end -}}
{{- end -}}

{{/* Environment of both programs of the bundled store; see files/store/run.sh. */}}
{{- define "rb.storeProgramEnv" -}}
{{- $sentinel := .Values.store.sentinel -}}
{{- with include "rb.storePasswordEnv" . }}
{{- . }}
{{ end -}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
{{- if eq .Values.store.mode "sentinel" }}
- name: SELF
  value: $(POD_NAME).{{ include "rb.storeName" . }}.{{ .Release.Namespace }}.svc
- name: HOSTS
  value: {{ include "rb.storeHosts" . }}
- name: SERVICE
  value: {{ $sentinel.service }}
- name: REPL_BACKLOG
  value: {{ $sentinel.replicationBacklog }}
- name: REPLICA_BUFFER_LIMIT
  value: {{ $sentinel.replicaBufferLimit }}
- name: DOWN_AFTER_MS
  value: {{ include "rb.text" $sentinel.downAfterMs | quote }}
- name: FAILOVER_TIMEOUT_MS
  value: {{ include "rb.text" $sentinel.failoverTimeoutMs | quote }}
{{- end }}
{{- end -}}
