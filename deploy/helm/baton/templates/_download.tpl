{{- define "baton.downloadJob" -}}
{{ include "baton.fullname" . }}-model-download-{{ include "baton.downloadSpec" . | sha256sum | trunc 8 }}
{{- end -}}

{{/* The Job that downloads the model. It has no settings of Baton but the model's path, so no other setting renames it. */}}
{{- define "baton.downloadSpec" -}}
{{- $name := include "baton.fullname" . -}}
backoffLimit: 10
template:
  metadata:
    labels:
      app.kubernetes.io/name: baton-model-download
      app.kubernetes.io/instance: {{ .Release.Name | quote }}
  spec:
    serviceAccountName: {{ $name }}-model-download
    automountServiceAccountToken: false
    enableServiceLinks: false
    restartPolicy: OnFailure
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
      runAsNonRoot: true
      runAsUser: 65532
      runAsGroup: 65532
      fsGroup: 65532
      seccompProfile: {type: RuntimeDefault}
    containers:
      - name: download
        {{- include "baton.pull" (dict "root" . "role" "gateway") | nindent 8 }}
        # What is complete is kept, so a restart goes on where it was.
        command:
          - /bin/sh
          - -ec
          - |
            if [ -e "$BATON_MODEL" ]; then echo "$BATON_MODEL is there"; exit 0; fi
            hf download "$MODEL_REPOSITORY" --revision "$MODEL_REVISION" --local-dir "$BATON_MODEL.partial" \
                --include '*.json' --include '*.jinja' --include 'tokenizer*' --include '*.safetensors' \
                --exclude '*/*' --exclude 'consolidated*'
            mv "$BATON_MODEL.partial" "$BATON_MODEL"
        env:
          - name: BATON_MODEL
            value: /models/{{ .Values.model.directory }}
          - name: MODEL_REPOSITORY
            value: {{ .Values.model.download.repository | quote }}
          - name: MODEL_REVISION
            value: {{ .Values.model.download.revision | quote }}
          # A secret may be absent; without the file the hub is asked without a token.
          - name: HF_TOKEN_PATH
            value: /etc/baton/hub/token
          - name: HF_HUB_DISABLE_TELEMETRY
            value: "1"
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
