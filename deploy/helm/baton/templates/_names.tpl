{{/* Names, labels, images and settings. Each takes a dict with `root` and, where it depends on the role, `role`. */}}

{{- define "baton.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects a role's pods. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* Metadata of an object: `suffix` of its name, `role` where it belongs to one. */}}
{{- define "baton.metadata" -}}
name: {{ include "baton.fullname" .root }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
{{ include "baton.labels" . }}
{{- end -}}

{{- define "baton.labels" -}}
labels:
  {{- include "baton.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The role's values: those of `node`, where it is one, with its own on top. As YAML. */}}
{{- define "baton.role" -}}
{{- if eq .role "gateway" -}}
{{- toYaml .root.Values.gateway -}}
{{- else -}}
{{- toYaml (mergeOverwrite (omit (deepCopy .root.Values.node) "settings") (deepCopy (index .root.Values .role))) -}}
{{- end -}}
{{- end -}}

{{- define "baton.image" -}}
{{- $image := (index .root.Values .role).image -}}
{{- with .root.Values.images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest -}}
@{{ $image.digest }}
{{- else -}}
:{{ coalesce $image.tag .root.Values.images.tag .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The image of a container, and when to pull it. */}}
{{- define "baton.pull" -}}
image: {{ include "baton.image" . }}
{{- with .root.Values.images.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end -}}

{{/* The hosts that the images run on, as a nodeSelector. */}}
{{- define "baton.architecture" -}}
{{- with .Values.images.architecture }}
kubernetes.io/arch: {{ . }}
{{- end }}
{{- end -}}

{{- define "baton.tlsSecret" -}}
{{- default (printf "%s-%s-tls" (include "baton.fullname" .root) .role) (index .root.Values.tls.secrets .role) -}}
{{- end -}}

{{- define "baton.claim" -}}
{{- default (printf "%s-model" (include "baton.fullname" .)) .Values.model.volume.existingClaim -}}
{{- end -}}

{{/* Variables as the data of a ConfigMap. Numbers stay as they are written. */}}
{{- define "baton.data" -}}
{{- range $name, $value := . }}
{{ $name }}: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ toJson $value | quote }}{{ end }}
{{- end }}
{{- end -}}

{{/* Variables that every process has. */}}
{{- define "baton.common" -}}
BATON_HEALTH_LISTEN: "[::]:7003"
{{- if include "baton.innerTls" . }}
BATON_TLS_CERT: /etc/baton/tls/tls.crt
BATON_TLS_KEY: /etc/baton/tls/tls.key
BATON_TLS_CA: /etc/baton/tls/ca.crt
{{- end }}
{{- with include "baton.modelPath" . }}
BATON_MODEL: {{ . }}
{{- end }}
{{- end -}}

{{- define "baton.settings.gateway" -}}
{{ include "baton.common" . }}
{{- if or .Values.podMonitor.enabled (include "baton.meteredPool" .) }}
BATON_METRICS_LISTEN: "[::]:9400"
{{- end }}
BATON_LISTEN: "[::]:7000"
BATON_HTTP_LISTEN: "[::]:8000"
{{- if .Values.endpointSlices.enabled }}
BATON_PREFILL: k8s:///{{ include "baton.fullname" . }}-prefill:grpc
BATON_DECODE: k8s:///{{ include "baton.fullname" . }}-decode:grpc
{{- else }}
BATON_PREFILL: {{ include "baton.fullname" . }}-prefill:7001
BATON_DECODE: {{ include "baton.fullname" . }}-decode:7002
{{- end }}
{{- if include "baton.clientTls" . }}
BATON_CLIENT_TLS_CERT: /etc/baton/client-tls/tls.crt
BATON_CLIENT_TLS_KEY: /etc/baton/client-tls/tls.key
{{- else }}
BATON_INSECURE: "true"
{{- end }}
{{- if include "baton.keys" . }}
BATON_API_KEYS: /etc/baton/api-keys/keys.toml
{{- end }}
{{- with .Values.tracing.endpoint }}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ . | quote }}
{{- end }}
{{- include "baton.data" .Values.gateway.settings }}
{{- end -}}

{{- define "baton.settings.node" -}}
{{ include "baton.common" . }}
{{- if .Values.podMonitor.enabled }}
BATON_METRICS_LISTEN: "[::]:9400"
{{- end }}
{{- if not (include "baton.innerTls" .) }}
BATON_INSECURE: "true"
{{- end }}
{{- include "baton.data" .Values.node.settings }}
{{- end -}}

{{- define "baton.settings.prefill" -}}
BATON_LISTEN: "[::]:7001"
{{- include "baton.data" .Values.prefill.settings }}
{{- end -}}

{{- define "baton.settings.decode" -}}
BATON_LISTEN: "[::]:7002"
{{- include "baton.data" .Values.decode.settings }}
{{- end -}}
