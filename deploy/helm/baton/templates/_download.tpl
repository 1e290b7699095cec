{{- define "baton.downloadJob" -}}
{{ include "baton.fullname" . }}-model-download-{{ include "baton.downloadSpec" . | sha256sum | trunc 7 }}
{{- end -}}

{{/* The Job that downloads the model. It has no settings of Baton but the model's path, so no other setting renames it. */}}
{{- define "baton.downloadSpec" -}}
{{- $name := include "baton.fullname" . -}}
backoffLimit: 10
# Another model has that directory: no retry mends it.
podFailurePolicy:
  rules:
    - action: FailJob
      onExitCodes: {operator: In, values: [3]}
template:
  metadata:
    labels:
      app.kubernetes.io/name: baton-model-download
      app.kubernetes.io/instance: {{ .Release.Name | quote }}
      {{- if eq .Values.mesh "istio" }}
      sidecar.istio.io/inject: "false"
      {{- end }}
    {{- if eq .Values.mesh "linkerd" }}
    annotations: {linkerd.io/inject: disabled}
    {{- end }}
  spec:
    serviceAccountName: {{ $name }}-model-download
    automountServiceAccountToken: false
    enableServiceLinks: false
    # Pods that failed stay, with their logs.
    restartPolicy: Never
    {{- with .Values.images.pullSecrets }}
    imagePullSecrets:
      {{- range . }}
      - name: {{ . }}
      {{- end }}
    {{- end }}
    {{- with include "baton.architecture" . }}
    nodeSelector:
      {{- . | nindent 6 }}
    {{- end }}
    securityContext:
      {{- include "baton.podSecurity" . | nindent 6 }}
      {{- if not .Values.podSecurity.fsGroup }}
      {{- with .Values.podSecurity.runAsGroup }}
      fsGroup: {{ int64 . }}
      {{- end }}
      {{- end }}
    containers:
      - name: download
        {{- include "baton.pull" (dict "root" . "role" "gateway") | nindent 8 }}
        # What is complete is kept, so a retry goes on where it was. The file .baton-source says what a directory has.
        command:
          - /bin/sh
          - -ec
          - |
            source="$MODEL_REPOSITORY@$MODEL_REVISION"
            partial="$BATON_MODEL.partial"
            if [ -e "$BATON_MODEL" ]; then
                found=$(cat "$BATON_MODEL/.baton-source" 2>/dev/null || echo "of an unknown source")
                if [ "$found" = "$source" ]; then echo "$BATON_MODEL is $source"; exit 0; fi
                echo "$BATON_MODEL is $found, not $source: choose another directory, or remove that one" >&2
                exit 3
            fi
            if [ "$(cat "$partial/.baton-source" 2>/dev/null)" != "$source" ]; then rm -rf "$partial"; fi
            mkdir -p "$partial"
            echo "$source" > "$partial/.baton-source"
            hf download "$MODEL_REPOSITORY" --revision "$MODEL_REVISION" --local-dir "$partial" \
                --include '*.json' --include '*.jinja' --include 'tokenizer*' --include '*.safetensors' \
                --exclude '*/*' --exclude 'consolidated*'
            mv -T "$partial" "$BATON_MODEL"
        env:
          - name: BATON_MODEL
            value: {{ include "baton.modelPath" . }}
          - name: MODEL_REPOSITORY
            value: {{ .Values.model.download.repository | quote }}
          - name: MODEL_REVISION
            value: {{ .Values.model.download.revision | quote }}
          # A secret may be absent; without the file the hub is asked without a token.
          - name: HF_TOKEN_PATH
            value: /etc/baton/hub/token
          - name: HF_HUB_DISABLE_TELEMETRY
            value: "1"
          {{- with .Values.model.download.endpoint }}
          - name: HF_ENDPOINT
            value: {{ . | quote }}
          {{- end }}
          {{- include "baton.proxy" . | nindent 10 }}
        terminationMessagePolicy: FallbackToLogsOnError
        resources:
          requests: {cpu: "1", memory: 2Gi}
          limits: {cpu: "4", memory: 2Gi}
        securityContext:
          {{- include "baton.containerSecurity" . | nindent 10 }}
        volumeMounts:
          - {name: tmp, mountPath: /tmp}
          - {name: model, mountPath: /models}
          - {name: hub, mountPath: /etc/baton/hub, readOnly: true}
    volumes:
      - name: tmp
        emptyDir: {sizeLimit: 1Gi}
      - name: model
        persistentVolumeClaim: {claimName: {{ include "baton.claim" . }}}
      - name: hub
        secret: {secretName: {{ default (printf "%s-hub" $name) .Values.model.download.tokenSecret }}, optional: true}
{{- end -}}
