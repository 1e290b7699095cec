{{/* What `extra` adds to a role: that of all roles, of both node roles, and of the role itself. Maps are merged, and a list
replaces the list of the level above. As YAML. */}}
{{- define "baton.extra" -}}
{{- $levels := list .root.Values.extra }}
{{- if ne .role "gateway" }}
{{- $levels = append $levels .root.Values.node.extra }}
{{- end }}
{{- if ne .role "node" }}
{{- $levels = append $levels (index .root.Values .role).extra }}
{{- end }}
{{- $result := dict }}
{{- range $levels }}
{{- $_ := include "baton.setAll" (list $result .) }}
{{- end }}
{{- toYaml $result }}
{{- end -}}

{{/* Sets all values of the second map in the first one. Maps in them are merged; anything else replaces what was there. */}}
{{- define "baton.setAll" -}}
{{- $into := index . 0 }}
{{- range $key, $value := index . 1 }}
{{- $known := get $into $key }}
{{- if and (kindIs "map" $value) (kindIs "map" $known) }}
{{- $_ := include "baton.setAll" (list $known $value) }}
{{- else }}
{{- $_ := set $into $key (kindIs "map" $value | ternary (deepCopy (default dict $value)) $value) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The pod template of a role with what `extra` adds, from a dict with `root` and `role`. */}}
{{- define "baton.pod" -}}
{{- $text := include "baton.ownPod" . }}
{{- $pod := fromYaml $text }}
{{- if not $pod.spec }}
{{- fail (printf "the pod of %s is no YAML: %v" .role $pod.Error) }}
{{- end }}
{{- $extra := include "baton.extra" . | fromYaml }}
{{- range $field, $_ := $extra.podSpec }}
{{- if has $field (list "nodeSelector" "tolerations" "runtimeClassName" "priorityClassName" "terminationGracePeriodSeconds") }}
{{- fail (printf "extra.podSpec.%s has a value of its own: use %s.%s" $field $.role $field) }}
{{- else if has $field (list "volumes" "initContainers") }}
{{- fail (printf "extra.podSpec.%s would replace the chart's own: use extra.%s" $field $field) }}
{{- end }}
{{- end }}
{{- $_ := include "baton.setAll" (list $pod.metadata.labels $extra.podLabels) }}
{{- $_ := include "baton.setAll" (list $pod.metadata.annotations $extra.podAnnotations) }}
{{- $claims := default list $pod.spec.resourceClaims }}
{{- $_ := include "baton.setAll" (list $pod.spec $extra.podSpec) }}
{{- /* Containers name the chart's own claims, so these stay. */}}
{{- with concat $claims (default list (default dict $extra.podSpec).resourceClaims) }}
{{- $_ := set $pod.spec "resourceClaims" . }}
{{- end }}
{{- range concat $pod.spec.containers (default list $pod.spec.initContainers) }}
{{- $_ := include "baton.setAll" (list .securityContext $extra.containerSecurityContext) }}
{{- end }}
{{- $container := first $pod.spec.containers }}
{{- $_ := set $container "envFrom" (concat $container.envFrom (default list $extra.envFrom)) }}
{{- $_ := set $container "volumeMounts" (concat $container.volumeMounts (default list $extra.volumeMounts)) }}
{{- $volumes := default list $extra.volumes }}
{{- $names := list }}
{{- range $volumes }}
{{- $names = append $names .name }}
{{- end }}
{{- range $pod.spec.volumes }}
{{- if not (has .name $names) }}
{{- $volumes = append $volumes . }}
{{- end }}
{{- end }}
{{- $_ := set $pod.spec "volumes" $volumes }}
{{- with concat (default list $pod.spec.initContainers) (default list $extra.initContainers) }}
{{- $_ := set $pod.spec "initContainers" . }}
{{- end }}
{{- toYaml $pod }}
{{- end -}}
