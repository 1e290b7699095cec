{{/* What protects traffic, each as `true` or empty. */}}
{{- define "baton.innerTls" -}}
{{- .Values.insecure | ternary "" "true" -}}
{{- end -}}

{{- define "baton.clientTls" -}}
{{- .Values.insecure | ternary "" "true" -}}
{{- end -}}

{{- define "baton.keys" -}}
{{- .Values.insecure | ternary "" "true" -}}
{{- end -}}
