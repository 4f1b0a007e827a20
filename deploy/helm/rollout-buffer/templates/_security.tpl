{{/* Certificates and tokens: which Secrets, and where they are mounted. */}}

{{- define "rb.tlsOn" -}}
{{- if ne .Values.security.tls.source "none" }}true{{ end -}}
{{- end -}}

{{- define "rb.tlsSecret" -}}
{{- $tls := .Values.security.tls -}}
{{- if eq $tls.source "secret" -}}
{{- required "security.tls.secret: name the Secret with tls.crt, tls.key and ca.crt" $tls.secret -}}
{{- else -}}
{{ include "rb.fullname" . }}-tls
{{- end -}}
{{- end -}}

{{- define "rb.clientTlsSecret" -}}
{{- $tls := .Values.security.tls -}}
{{- if eq $tls.source "secret" -}}
{{- required "security.tls.clientSecret: mutual TLS needs the Secret with the certificate that workers show" $tls.clientSecret -}}
{{- else -}}
{{ include "rb.fullname" . }}-client-tls
{{- end -}}
{{- end -}}

{{- define "rb.checkSecurity" -}}
{{- $s := .Values.security -}}
{{- $complete := and (include "rb.tlsOn" .) $s.tokens.secret -}}
{{- if and (not $complete) (not $s.insecure) -}}
{{- fail "security: give the service a certificate (security.tls.source) and tokens (security.tokens.secret), or set security.insecure=true, and everybody who reaches its ports may do everything" -}}
{{- end -}}
{{- if and $complete $s.insecure -}}
{{- fail "security: insecure=true contradicts the certificate and the tokens that are given; leave one of them out" -}}
{{- end -}}
{{- end -}}

{{/* The name under which clients reach the service, and which its certificate has to bear. */}}
{{- define "rb.host" -}}
{{ include "rb.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* Where a client (a worker, the test) finds the authority, its certificate and its token. dict root, token */}}
{{- define "rb.clientEnv" -}}
- name: RB_ADDRESS
  value: {{ include "rb.host" .root }}:{{ .root.Values.service.ports.grpc }}
{{- if include "rb.tlsOn" .root }}
- name: RB_TLS_CA
  value: /etc/rollout-buffer/ca/ca.crt
{{- if .root.Values.security.tls.mutual }}
- name: RB_TLS_CLIENT_CERT
  value: /etc/rollout-buffer/client-tls/tls.crt
- name: RB_TLS_CLIENT_KEY
  value: /etc/rollout-buffer/client-tls/tls.key
{{- end }}
{{- end }}
{{- if .token.secret }}
- name: RB_TOKEN_FILE
  value: /etc/rollout-buffer/token/token
{{- if .root.Values.security.insecure }}
- name: RB_INSECURE
  value: "true"
{{- end }}
{{- end }}
{{- end -}}

{{- define "rb.clientMounts" -}}
{{- if include "rb.tlsOn" .root }}
- {name: ca, mountPath: /etc/rollout-buffer/ca, readOnly: true}
{{- if .root.Values.security.tls.mutual }}
- {name: client-tls, mountPath: /etc/rollout-buffer/client-tls, readOnly: true}
{{- end }}
{{- end }}
{{- if .token.secret }}
- {name: token, mountPath: /etc/rollout-buffer/token, readOnly: true}
{{- end }}
{{- end -}}

{{- define "rb.clientVolumes" -}}
{{- if include "rb.tlsOn" .root }}
- name: ca
  secret:
    secretName: {{ include "rb.tlsSecret" .root }}
    defaultMode: 0440
    # The authority alone: the service's key is none of a client's business.
    items: [{key: ca.crt, path: ca.crt}]
{{- if .root.Values.security.tls.mutual }}
- name: client-tls
  secret:
    secretName: {{ include "rb.clientTlsSecret" .root }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- with .token }}
{{- if .secret }}
- name: token
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
    items: [{key: {{ .key }}, path: token}]
{{- end }}
{{- end }}
{{- end -}}

{{/* How probes and Prometheus speak with the admin page. */}}
{{- define "rb.adminScheme" -}}
{{- ternary "HTTPS" "HTTP" (ne (include "rb.tlsOn" .) "") -}}
{{- end -}}

{{- define "rb.issuer" -}}
{{- with .Values.security.tls.issuer -}}
name: {{ required "security.tls.issuer.name: cert-manager needs the issuer's name" .name }}
kind: {{ .kind }}
group: {{ .group }}
{{- end -}}
{{- end -}}
