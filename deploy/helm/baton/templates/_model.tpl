{{/* Where a model's files come from: a volume, which the download may fill, an OCI image, or S3. Each but the first two takes
a dict with `root` and `role`. */}}

{{/* The model's directory. The download's has the revision in its path: another revision is another directory, and the pods of
the old one keep theirs. */}}
{{- define "baton.modelPath" -}}
{{- with .Values.model.directory -}}
/models/{{ if $.Values.model.download.enabled }}{{ $.Values.model.download.revision }}/{{ end }}{{ . }}
{{- end -}}
{{- end -}}

{{/* Refuses a model of two sources, and a source without its values. */}}
{{- define "baton.checkModel" -}}
{{- $model := .Values.model }}
{{- $sources := compact (list (ternary "model.download.enabled" "" $model.download.enabled) (ternary "model.image.reference" "" (ne $model.image.reference "")) (ternary "model.s3.uri" "" (ne $model.s3.uri ""))) }}
{{- if gt (len $sources) 1 }}
{{- fail (printf "%s are set together: a model comes from one of them" (join " and " $sources)) }}
{{- end }}
{{- range $sources }}
{{- if not $model.directory }}
{{- fail (printf "%s needs model.directory: the name of the directory to fill" .) }}
{{- end }}
{{- if and $model.volume.existingClaim (ne . "model.download.enabled") }}
{{- fail (printf "%s and model.volume.existingClaim are set together: a model comes from one of them" .) }}
{{- end }}
{{- end }}
{{- if and $model.download.enabled (not $model.download.repository) }}
{{- fail "model.download.enabled needs model.download.repository, such as Qwen/Qwen3-8B" }}
{{- end }}
{{- if and $model.image.reference (eq $model.image.by "copy") (not $model.image.path) }}
{{- fail "model.image.by: copy needs model.image.path: the directory in the image that has config.json" }}
{{- end }}
{{- if and $model.s3.uri (not $model.s3.image) }}
{{- fail "model.s3.uri needs model.s3.image: an image that has the program aws" }}
{{- end }}
{{- end -}}

{{/* Whether a claim holds the model. */}}
{{- define "baton.hasClaim" -}}
{{- if and .Values.model.directory (not .Values.model.image.reference) (not .Values.model.s3.uri) -}}
true
{{- end -}}
{{- end -}}

{{- define "baton.modelVolume" -}}
{{- $model := .root.Values.model }}
{{- if include "baton.hasClaim" .root -}}
- name: model
  persistentVolumeClaim: {claimName: {{ include "baton.claim" .root }}, readOnly: true}
{{- else if and $model.image.reference (eq $model.image.by "volume") -}}
- name: model
  image: {reference: {{ $model.image.reference }}{{ with $model.image.pullPolicy }}, pullPolicy: {{ . }}{{ end }}}
{{- else if $model.directory -}}
- name: model
  emptyDir: {sizeLimit: {{ include "baton.podStorage" . }}}
{{- end -}}
{{- end -}}

{{/* Gateways read no weights, so they get none. */}}
{{- define "baton.podStorage" -}}
{{ eq .role "gateway" | ternary "1Gi" .root.Values.model.podStorage }}
{{- end -}}

{{- define "baton.modelMount" -}}
{{- $model := .root.Values.model }}
{{- if and $model.image.reference (eq $model.image.by "volume") -}}
- {name: model, mountPath: {{ include "baton.modelPath" .root }}{{ with $model.image.path }}, subPath: {{ . }}{{ end }}, readOnly: true}
{{- else if $model.directory -}}
- {name: model, mountPath: /models, readOnly: true}
{{- end -}}
{{- end -}}

{{/* Init containers: the one that waits for the download, or the one that copies the model into the pod. */}}
{{- define "baton.modelInit" -}}
{{- $root := .root }}
{{- $model := $root.Values.model }}
{{- if $model.download.enabled -}}
- name: wait-for-model
  {{- include "baton.pull" (dict "root" $root "role" "gateway") | nindent 2 }}
  # The directory appears at once when its download is complete. Its file says what was downloaded.
  command:
    - /bin/sh
    - -ec
    - |
      until [ "$(cat "$BATON_MODEL/.baton-source" 2>/dev/null)" = "$MODEL_REPOSITORY@$MODEL_REVISION" ]; do
          echo "waiting for $MODEL_REPOSITORY@$MODEL_REVISION in $BATON_MODEL"; sleep 5
      done
  envFrom:
    - configMapRef: {name: {{ include "baton.fullname" $root }}-gateway}
  env:
    - name: MODEL_REPOSITORY
      value: {{ $model.download.repository | quote }}
    - name: MODEL_REVISION
      value: {{ $model.download.revision | quote }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {cpu: 100m, memory: 32Mi}
  securityContext:
    {{- include "baton.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /models, readOnly: true}
{{- else if and $model.image.reference (eq $model.image.by "copy") -}}
- name: copy-model
  image: {{ $model.image.reference }}
  {{- with $model.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  {{- if eq .role "gateway" }}
  # Gateways read no weights.
  {{- end }}
  command:
    - /bin/sh
    - -ec
    - |
      mkdir -p "$BATON_MODEL"
      {{- if eq .role "gateway" }}
      for file in "$MODEL_FILES"/*; do
          case "$file" in *.safetensors) ;; *) cp -R "$file" "$BATON_MODEL/" ;; esac
      done
      {{- else }}
      cp -R "$MODEL_FILES/." "$BATON_MODEL/"
      {{- end }}
  env:
    - name: BATON_MODEL
      value: {{ include "baton.modelPath" $root }}
    - name: MODEL_FILES
      value: /{{ $model.image.path }}
  {{- include "baton.copyPod" . | nindent 2 }}
{{- else if $model.s3.uri -}}
- name: copy-model
  image: {{ $model.s3.image }}
  {{- with $root.Values.images.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  {{- if eq .role "gateway" }}
  # Gateways read no weights.
  {{- end }}
  command: [aws, s3, sync, --no-progress, {{ trimSuffix "/" $model.s3.uri }}/, $(BATON_MODEL){{ if eq .role "gateway" }}, --exclude, "*.safetensors"{{ end }}]
  {{- with $model.s3.secret }}
  envFrom:
    - secretRef: {name: {{ . }}}
  {{- end }}
  env:
    - name: BATON_MODEL
      value: {{ include "baton.modelPath" $root }}
    # The program's own files, and its cache of credentials.
    - name: HOME
      value: /tmp
    {{- with $model.s3.region }}
    - name: AWS_REGION
      value: {{ . | quote }}
    {{- end }}
    {{- with $model.s3.endpoint }}
    - name: AWS_ENDPOINT_URL_S3
      value: {{ . | quote }}
    {{- end }}
    {{- include "baton.proxy" $root | nindent 4 }}
  {{- include "baton.copyPod" . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* What both kinds of copies have. The request for ephemeral storage leads the pod to a host that has room for the model. */}}
{{- define "baton.copyPod" -}}
resources:
  requests: {cpu: 250m, memory: 512Mi, ephemeral-storage: {{ include "baton.podStorage" . }}}
  limits: {memory: 512Mi}
securityContext:
  {{- include "baton.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: model, mountPath: /models}
  - {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "baton.proxy" -}}
{{- range $name, $value := dict "HTTP_PROXY" .Values.proxy.http "HTTPS_PROXY" .Values.proxy.https "NO_PROXY" .Values.proxy.except }}
{{- with $value }}
- name: {{ $name }}
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Egress to the hub or the bucket, by way of a mirror or a proxy where there is one. */}}
{{- define "baton.fetchPorts" -}}
{{- range .Values.model.egressPorts }}
- {protocol: TCP, port: {{ . }}}
{{- end }}
- {protocol: UDP, port: 53}
- {protocol: TCP, port: 53}
- {protocol: UDP, port: 5353}
- {protocol: TCP, port: 5353}
{{- end -}}

{{/* Seconds until the pods of a role serve after their rollout began: pulling images and scheduling take up to 600, the
predecessor may have to drain first, the model may have to arrive, and the process loads it. */}}
{{- define "baton.progressDeadline" -}}
{{- $values := include "baton.role" . | fromYaml }}
{{- $model := .root.Values.model }}
{{- $fetch := ternary (int $model.fetchSeconds) 0 (or $model.download.enabled (ne $model.image.reference "") (ne $model.s3.uri "")) }}
{{- $failures := int $values.startupFailures }}
{{- if and (eq .role "decode") .root.Values.nvlinkPair.enabled }}
{{- $failures = max $failures (int (include "baton.role" (dict "root" .root "role" "prefill") | fromYaml).startupFailures) }}
{{- end }}
{{- add 600 (include "baton.grace" .) (mul (eq .role "gateway" | ternary 2 5) $failures) $fetch }}
{{- end -}}

{{/* A pod's grace period: preStop, the drain, and 15 seconds to close what is left. One that is given may be longer. */}}
{{- define "baton.grace" -}}
{{- $values := include "baton.role" . | fromYaml }}
{{- $before := int (default 0 $values.preStopSeconds) }}
{{- $drain := ceil (float64 $values.settings.BATON_DRAIN_GRACE_S) | int }}
{{- $given := int (default 0 $values.terminationGracePeriodSeconds) }}
{{- if and $given (lt $given (int (add $before $drain 10))) }}
{{- fail (printf "%s.terminationGracePeriodSeconds is %v, which ends the pod before its drain: use %v or more, or leave it out" .role $given (add $before $drain 10)) }}
{{- end }}
{{- if eq .role "gateway" }}
{{- $longest := float64 (default 600 $values.settings.BATON_REQUEST_TIMEOUT_S) }}
{{- if lt (float64 $values.settings.BATON_DRAIN_GRACE_S) $longest }}
{{- fail (printf "gateway.settings.BATON_DRAIN_GRACE_S is %v, and a request may take the %v s of BATON_REQUEST_TIMEOUT_S: use %v or more, or lower BATON_REQUEST_TIMEOUT_S" $values.settings.BATON_DRAIN_GRACE_S $longest $longest) }}
{{- end }}
{{- end }}
{{- $grace := $given | default (add $before $drain 15) }}
{{- /* The prefill node of a pair ends with its pod. */}}
{{- if and (eq .role "decode") .root.Values.nvlinkPair.enabled }}
{{- $grace = max $grace (int (include "baton.grace" (dict "root" .root "role" "prefill"))) }}
{{- end }}
{{- $grace }}
{{- end -}}
