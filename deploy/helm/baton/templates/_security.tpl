{{/* What protects traffic, each as `true` or empty: what the value says, else whether the release is not insecure. */}}
{{- define "baton.on" -}}
{{- if kindIs "bool" .value }}{{ .value | ternary "true" "" }}{{ else }}{{ .root.Values.insecure | ternary "" "true" }}{{ end -}}
{{- end -}}

{{- define "baton.innerTls" -}}
{{- include "baton.on" (dict "root" . "value" .Values.tls.inner) -}}
{{- end -}}

{{- define "baton.clientTls" -}}
{{- include "baton.on" (dict "root" . "value" .Values.tls.client) -}}
{{- end -}}

{{- define "baton.keys" -}}
{{- include "baton.on" (dict "root" . "value" .Values.apiKeys.enabled) -}}
{{- end -}}

{{- define "baton.pickerTls" -}}
{{- if .Values.inferencePool.enabled }}{{ include "baton.on" (dict "root" . "value" .Values.inferencePool.tls) }}{{ end -}}
{{- end -}}

{{/* Whether the picker reads metrics at their own port, because /metrics of the HTTP port needs an operator's key. */}}
{{- define "baton.meteredPool" -}}
{{- if .Values.inferencePool.enabled }}{{ include "baton.keys" . }}{{ end -}}
{{- end -}}

{{/* The pod's security context. What is null is left to the cluster. */}}
{{- define "baton.podSecurity" -}}
runAsNonRoot: true
{{- range $field := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- with index $.Values.podSecurity $field }}
{{ $field }}: {{ int64 . }}
{{- end }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* DNS, wherever the cluster runs it. OpenShift's listens on 5353. */}}
{{- define "baton.dns" -}}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
    - {protocol: UDP, port: 5353}
    - {protocol: TCP, port: 5353}
{{- end -}}

{{/* Annotations of a role's pods for a mesh, from a dict with `root` and `role`. Istio's lists have no ranges of ports, so
     nothing of a node's traffic goes through its sidecar there. */}}
{{- define "baton.mesh" -}}
{{- $mesh := .root.Values.mesh }}
{{- $isGateway := eq .role "gateway" }}
{{- if and (eq $mesh "istio") $isGateway }}
traffic.sidecar.istio.io/excludeInboundPorts: "7003"
traffic.sidecar.istio.io/excludeOutboundPorts: "7001,7002"
{{- else if eq $mesh "istio" }}
traffic.sidecar.istio.io/includeInboundPorts: ""
traffic.sidecar.istio.io/includeOutboundIPRanges: ""
{{- else if and (eq $mesh "linkerd") $isGateway }}
config.linkerd.io/skip-inbound-ports: "7003"
config.linkerd.io/skip-outbound-ports: "7001,7002"
{{- else if eq $mesh "linkerd" }}
config.linkerd.io/skip-inbound-ports: "7001,7002,7003,7005,20000-20999"
config.linkerd.io/skip-outbound-ports: "7002,20000-20999"
{{- end }}
{{- end -}}
