{{/* Relays of weights, and what workers are told of them. */}}

{{- define "rb.relayName" -}}
{{ include "rb.fullname" . }}-relay
{{- end -}}

{{/* The URL under which workers reach the relay, and whose host its certificate has to bear. */}}
{{- define "rb.relayUrl" -}}
{{ ternary "https" "http" (ne .Values.relay.tls.secret "") }}://{{ include "rb.relayName" . }}.{{ .Release.Namespace }}.svc:{{ .Values.relay.port }}
{{- end -}}

{{- define "rb.checkRelay" -}}
{{- $relay := .Values.relay -}}
{{- if not $relay.upstreams -}}
{{- fail "relay.upstreams: name the publisher, or a relay that is nearer to it" -}}
{{- end -}}
{{- if and (eq $relay.storage.volume "claim") (not $relay.storage.claim) -}}
{{- fail "relay.storage.claim: name the PersistentVolumeClaim" -}}
{{- end -}}
{{- if and .Values.security.weights.token.secret (not $relay.tls.secret) (not .Values.security.insecure) -}}
{{- fail "relay.tls.secret: with security.weights.token workers send a token, which does not travel in plain text; name the Secret with the relay's tls.crt and tls.key" -}}
{{- end -}}
{{- if ge (mulf $relay.maxGb 1e9) (include "rb.bytes" $relay.storage.size | float64) -}}
{{- fail (printf "relay.maxGb: %v GB do not fit into relay.storage.size (%s)" $relay.maxGb $relay.storage.size) -}}
{{- end -}}
{{- end -}}

{{/* Of who fetches weights: token and authority. */}}
{{- define "rb.weightsEnv" -}}
{{- with .Values.security.weights }}
{{- if .token.secret }}
- name: RB_WEIGHTS_TOKEN_FILE
  value: /etc/rollout-buffer/weights-token/token
{{- end }}
{{- if .ca.secret }}
- name: RB_WEIGHTS_TLS_CA
  value: /etc/rollout-buffer/weights-ca/ca.crt
{{- end }}
{{- end }}
{{- end -}}

{{- define "rb.weightsMounts" -}}
{{- with .Values.security.weights }}
{{- if .token.secret }}
- {name: weights-token, mountPath: /etc/rollout-buffer/weights-token, readOnly: true}
{{- end }}
{{- if .ca.secret }}
- {name: weights-ca, mountPath: /etc/rollout-buffer/weights-ca, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "rb.weightsVolumes" -}}
{{- range $name, $file := dict "token" "token" "ca" "ca.crt" }}
{{- $given := get $.Values.security.weights $name }}
{{- if $given.secret }}
- name: weights-{{ $name }}
  secret:
    secretName: {{ $given.secret }}
    defaultMode: 0440
    items: [{key: {{ $given.key }}, path: {{ $file }}}]
{{- end }}
{{- end }}
{{- end -}}
