{{/* The pod template of a role, without what `extra` adds, from a dict with `root` and `role`. */}}
{{- define "baton.ownPod" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $name := include "baton.fullname" $root }}
{{- $values := include "baton.role" . | fromYaml }}
{{- $isGateway := eq $role "gateway" }}
{{- $port := get (dict "gateway" 7000 "prefill" 7001 "decode" 7002) $role }}
{{- $service := get (dict "gateway" "Generation" "prefill" "Prefill" "decode" "Decode") $role }}
{{- $cache := and (not $isGateway) $root.Values.node.compileCache.enabled }}
{{- $domain := and (not $isGateway) $root.Values.computeDomain.enabled }}
{{- $pair := and (not $isGateway) $root.Values.nvlinkPair.enabled }}
{{- $isSecond := and $pair (eq $role "prefill") }}
{{- $health := $isSecond | ternary 7005 7003 }}
{{- $before := $isGateway | ternary (int $values.preStopSeconds) 0 }}
metadata:
  labels:
    {{- include "baton.selector" . | nindent 4 }}
  annotations:
    # A changed setting rolls out like a changed image.
    {{- $read := $isGateway | ternary (include "baton.settings.gateway" $root) (print (include "baton.settings.node" $root) (include (printf "baton.settings.%s" $role) $root)) }}
    {{- if $pair }}{{- $read = print $read (include "baton.settings.prefill" $root) }}{{- end }}
    checksum/settings: {{ sha256sum $read }}
    {{- with mergeOverwrite (include "baton.mesh" . | fromYaml) (deepCopy $values.podAnnotations) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ $name }}-{{ $role }}
  automountServiceAccountToken: {{ and $isGateway $root.Values.endpointSlices.enabled }}
  # With service links, services would appear in the environment as BATON_*.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "baton.grace" . }}
  {{- with $root.Values.images.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- $class := $root.Values.priority.create | ternary (printf "%s-%s" $name ($isGateway | ternary "gateway" "node")) "" }}
  {{- with default $class $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with merge (deepCopy $values.nodeSelector) (include "baton.architecture" $root | fromYaml) }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "baton.podSecurity" $root | nindent 4 }}
    {{- if $cache }}
    {{- if not $root.Values.podSecurity.fsGroup }}
    {{- with $root.Values.podSecurity.runAsGroup }}
    fsGroup: {{ int64 . }}
    {{- end }}
    {{- end }}
    fsGroupChangePolicy: OnRootMismatch
    {{- end }}
  {{- if $pair }}
  # For cuda_ipc, the containers also share the pod's IPC namespace and see all GPUs of its claim.
  shareProcessNamespace: true
  {{- end }}
  {{- if or $pair $domain }}
  resourceClaims:
    {{- if $domain }}
    - {name: imex-channel, resourceClaimTemplateName: {{ $name }}-imex-channel}
    {{- end }}
    {{- if $pair }}
    - {name: gpus, resourceClaimTemplateName: {{ $name }}-gpus}
    {{- end }}
  {{- end }}
  topologySpreadConstraints:
    {{- range $isGateway | ternary (list "topology.kubernetes.io/zone" "kubernetes.io/hostname") (list "kubernetes.io/hostname") }}
    - topologyKey: {{ . }}
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "baton.selector" $ | nindent 10 }}
    {{- end }}
  {{- if or $domain (eq $role "prefill") }}
  affinity:
    podAffinity:
      {{- if $domain }}
      # Hosts of one NVLink partition.
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: nvidia.com/gpu.clique
          labelSelector:
            matchLabels:
              {{- include "baton.selector" (dict "root" $root) | nindent 14 }}
            matchExpressions:
              - {key: app.kubernetes.io/component, operator: In, values: [prefill, decode]}
      {{- end }}
      {{- if eq $role "prefill" }}
      # KV goes only from prefill to decode nodes. Keep that traffic within a zone if the zone has room.
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: topology.kubernetes.io/zone
            labelSelector:
              matchLabels:
                {{- include "baton.selector" (dict "root" $root "role" "decode") | nindent 16 }}
      {{- end }}
  {{- end }}
  {{- with include "baton.modelInit" . }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ $role }}
      {{- include "baton.pull" . | nindent 6 }}
      envFrom:
        {{- if not $isGateway }}
        - configMapRef: {name: {{ $name }}}
        {{- end }}
        - configMapRef: {name: {{ $name }}-{{ $role }}}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: BATON_ADVERTISE
          value: $(POD_IP):{{ $port }}
        - name: BATON_NAME
          value: $(POD_NAME){{ $isSecond | ternary "-prefill" "" }}
        {{- if $isGateway }}
        # Threads that read large bodies give back what they have freed.
        - name: MALLOC_ARENA_MAX
          value: "2"
        {{- else }}
        # Kubernetes 1.35 and later copy the node's zone to the pod; without it, nodes are grouped by host only.
        - name: ZONE
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
        - name: NODE_NAME
          valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
        - name: BATON_TOPOLOGY
          value: {{ $root.Values.topology | quote }}
        # Without a port range UCX listens on any port, which no NetworkPolicy could name.
        - name: UCX_TCP_PORT_RANGE
          value: 20000-20999
        {{- if $root.Values.rdma.enabled }}
        - name: RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY
          value: "true"
        {{- end }}
        {{- if $cache }}
        - {name: TRITON_CACHE_DIR, value: /var/cache/baton/triton}
        {{- end }}
        {{- end }}
        {{- if $pair }}
        - name: BATON_DEVICE
          value: cuda:{{ $isSecond | ternary 0 (include "baton.ranks" (dict "root" $root "role" "prefill")) }}
        {{- end }}
        {{- if $isSecond }}
        # Both containers have the pod's address: the second one has ports of its own.
        - {name: BATON_HEALTH_LISTEN, value: "[::]:7005"}
        - {name: BATON_METRICS_LISTEN, value: "[::]:9401"}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if and $root.Values.rdma.enabled (not $isGateway) (gt (int $values.hosts) 1) }}
        # Without an adapter, NCCL would fall back to TCP in silence. So the ranks end with its error instead.
        - name: NCCL_NET
          value: IB
        {{- end }}
      ports:
        - {name: grpc{{ $isSecond | ternary "-prefill" "" }}, containerPort: {{ $port }}}
        {{- if $isGateway }}
        - {name: http, containerPort: 8000}
        {{- end }}
        {{- if $isSecond }}
        - {name: metrics-prefill, containerPort: 9401}
        {{- else if or $root.Values.podMonitor.enabled (and $isGateway (include "baton.meteredPool" $root)) }}
        - {name: metrics, containerPort: 9400}
        {{- end }}
      # Of the server of BATON_HEALTH_LISTEN, which needs no certificate. The empty service name is live, the role's own
      # is ready. A node is live while it loads, and may not answer for seconds while it captures graphs, so only the
      # startup probe asks until it is ready.
      startupProbe:
        grpc: {port: {{ $health }}{{ $isGateway | ternary "" (printf ", service: baton.internal.v1.%s" $service) }}}
        periodSeconds: {{ $isGateway | ternary 2 5 }}
        failureThreshold: {{ $values.startupFailures }}
      livenessProbe:
        grpc: {port: {{ $health }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        grpc: {port: {{ $health }}, service: {{ $isGateway | ternary "baton.v1" "baton.internal.v1" }}.{{ $service }}}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 2
      {{- if $before }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ $before }}}
      {{- end }}
      resources:
        {{- $resources := $values.resources }}
        {{- if and $root.Values.rdma.enabled (not $isGateway) }}
        {{- $resources = mergeOverwrite (deepCopy $resources) (dict "limits" (dict $root.Values.rdma.resource $root.Values.rdma.count)) }}
        {{- end }}
        {{- if or $pair $domain }}
        claims:
          {{- if $domain }}
          - {name: imex-channel}
          {{- end }}
          {{- if $pair }}
          - {name: gpus}
          {{- end }}
        {{- end }}
        {{- if $pair }}
        {{- $resources = set (deepCopy $resources) "limits" (omit $resources.limits "nvidia.com/gpu") }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- include "baton.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if not $isGateway }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if $cache }}
        - {name: compile-cache, mountPath: /var/cache/baton}
        {{- end }}
        {{- include "baton.modelMount" . | nindent 8 }}
        {{- if include "baton.innerTls" $root }}
        - {name: tls{{ $isSecond | ternary "-prefill" "" }}, mountPath: /etc/baton/tls, readOnly: true}
        {{- end }}
        {{- if and $isGateway (include "baton.clientTls" $root) }}
        - {name: client-tls, mountPath: /etc/baton/client-tls, readOnly: true}
        {{- end }}
        {{- if and $isGateway (include "baton.keys" $root) }}
        - {name: api-keys, mountPath: /etc/baton/api-keys, readOnly: true}
        {{- end }}
    {{- if and $pair (not $isSecond) }}
    {{- $prefill := include "baton.pod" (dict "root" $root "role" "prefill") | fromYaml }}
    {{- toYaml $prefill.spec.containers | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $isGateway | ternary "256Mi" "1Gi" }}}
    {{- if not $isGateway }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSize }}}
    {{- end }}
    {{- if $cache }}
    - name: compile-cache
      persistentVolumeClaim: {claimName: {{ default (printf "%s-compile-cache" $name) $root.Values.node.compileCache.existingClaim }}}
    {{- end }}
    {{- if and $pair (not $isSecond) }}
    {{- /* What the second container mounts. */}}
    {{- range (include "baton.extra" (dict "root" $root "role" "prefill") | fromYaml).volumes }}
    {{- if not (has .name (list "tmp" "shm" "compile-cache" "model" "tls" "tls-prefill")) }}
    - {{ toJson . }}
    {{- end }}
    {{- end }}
    {{- end }}
    {{- include "baton.modelVolume" . | nindent 4 }}
    {{- if include "baton.innerTls" $root }}
    - name: tls
      secret: {secretName: {{ include "baton.tlsSecret" . }}}
    {{- if $pair }}
    - name: tls-prefill
      secret: {secretName: {{ include "baton.tlsSecret" (dict "root" $root "role" "prefill") }}}
    {{- end }}
    {{- end }}
    {{- if and $isGateway (include "baton.clientTls" $root) }}
    - name: client-tls
      secret: {secretName: {{ include "baton.tlsSecret" (dict "root" $root "role" "client") }}}
    {{- end }}
    {{- if and $isGateway (include "baton.keys" $root) }}
    - name: api-keys
      secret: {secretName: {{ default (printf "%s-api-keys" $name) $root.Values.apiKeys.secret }}}
    {{- end }}
{{- end -}}

{{/* Ranks of a node of the role, each on its own GPU. */}}
{{- define "baton.ranks" -}}
{{- $values := .root.Values -}}
{{- $own := (index $values .role).settings -}}
{{- int (coalesce (get $own "BATON_TENSOR_PARALLEL_SIZE") (get $values.node.settings "BATON_TENSOR_PARALLEL_SIZE") 1) -}}
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
