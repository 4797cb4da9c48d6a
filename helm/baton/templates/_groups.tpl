{{/*
What fleets mean for pods.

    fleets --baton.fleets--> workers of each role --baton.groups--> worker groups of the Ray cluster

A rank reserves one `baton_<role>` of Ray's resources, and pods offer as many as ranks belong there. So ranks are where
this chart has counted them, whatever CPUs or GPUs a pod has, and an autoscaler knows which pods to add. What starts and
watches a group shares the place of its first rank, and books a tenth of a CPU there (REPLICA_CPUS in cluster/spec).
*/}}

{{/*
{role: {fleet, tp, size, workers, least, most, gpus, cpus}}: numbers are of one group (size), one rank (gpus, cpus), or all
ranks: at the start (workers), at least and at most, which are the same but for a fleet that is scaled. Where machines do
not come and go, there are as many as it ever has.
*/}}
{{- define "baton.fleets" -}}
{{- $given := .Values.fleets }}
{{- if not $given }}{{ $given = dict "unified" dict }}{{ end }}
{{- $fleets := dict }}
{{- range $role := list "unified" "prefill" "decode" }}
{{- if kindIs "map" (index $given $role) }}
{{- $fleet := index $given $role }}
{{- $engine := mergeOverwrite (deepCopy $.Values.engine) (deepCopy ($fleet.engine | default dict)) }}
{{- $tp := int ($engine.tensor_parallel_size | default 1) }}
{{- $size := mul $tp (int ($engine.data_parallel_size | default 1)) }}
{{- $gpus := ternary 0 1 (eq ($engine.device | default "auto") "cpu") }}
{{- if not (kindIs "invalid" $fleet.num_gpus) }}{{ $gpus = $fleet.num_gpus }}{{ end }}
{{- $cpus := ternary 0.5 $fleet.num_cpus (kindIs "invalid" $fleet.num_cpus) }}
{{- $first := int (ternary ($fleet.min_replicas | default 0) 1 (hasKey $fleet "max_replicas")) }}
{{- if hasKey $fleet "replicas" }}{{ $first = int $fleet.replicas }}{{ end }}
{{- $least := $first }}
{{- $most := $first }}
{{- if hasKey $fleet "max_replicas" }}
{{- $most = int $fleet.max_replicas }}
{{- $least = int (ternary ($fleet.min_replicas | default 0) $most $.Values.autoscaling.enabled) }}
{{- $first = ternary $first $most $.Values.autoscaling.enabled }}
{{- end }}
{{- if and (hasKey $fleet "max_replicas") (eq (int ($fleet.min_replicas | default 0)) 0) (ne $role "prefill") (ne $.Values.load_balancing "internal") }}
{{- fail (printf "fleets.%s.min_replicas is 0: load_balancing is %s, so gateways are where its ranks are, and without any nobody would be there to answer; give 1 or more" $role $.Values.load_balancing) }}
{{- end }}
{{- $_ := set $fleets $role (dict "fleet" $fleet "tp" $tp "size" $size "workers" (mul $size $first) "least" (mul $size $least) "most" (mul $size $most) "gpus" $gpus "cpus" $cpus) }}
{{- end }}
{{- end }}
{{- toYaml $fleets }}
{{- end }}

{{/* How many gateways a pod with this share of the engines has. */}}
{{- define "baton.gatewaysOf" -}}
{{- $gateways := 0 }}
{{- range $role, $slots := .slots }}
{{- $fleet := index $.fleets $role }}
{{- if eq $role "prefill" }}
{{- else if eq $.mode "hybrid" }}
{{- $gateways = 1 }}
{{- else if eq $.mode "external" }}
{{- $gateways = add $gateways (ceil (divf $slots $fleet.tp)) }}
{{- end }}
{{- end }}
{{- int $gateways }}
{{- end }}

{{/*
groups: a list of {name, replicas, least, most, slots {role: ranks of a pod}, resources {Ray's name: amount}, cpus, gpus, gateways, pod};
least and most are of pods.
*/}}
{{- define "baton.groups" -}}
{{- $fleets := include "baton.fleets" . | fromYaml }}
{{- $mode := .Values.load_balancing }}
{{- $groups := list }}
{{- if eq $mode "internal" }}
{{- $pod := include "baton.podSettings" (dict "root" . "kind" "gateway") | fromYaml }}
{{- $groups = append $groups (dict "name" "gateway" "replicas" (int (.Values.gateway.replicas | default 1)) "least" (int (.Values.gateway.replicas | default 1)) "most" (int (.Values.gateway.replicas | default 1)) "slots" dict "resources" (dict "baton_gateway" 1) "cpus" 0 "gpus" 0 "gateways" 1 "pod" $pod) }}
{{- end }}
{{- $shares := list }}
{{- if eq .Values.layout "together" }}
{{- $pod := include "baton.podSettings" (dict "root" . "kind" "engines") | fromYaml }}
{{- $replicas := int ($pod.replicas | default 1) }}
{{- $slots := dict }}
{{- range $role, $fleet := $fleets }}
{{- $_ := set $slots $role (int (ceil (divf $fleet.most $replicas))) }}
{{- end }}
{{- $shares = append $shares (dict "name" "engines" "replicas" $replicas "least" $replicas "most" $replicas "slots" $slots "pod" $pod) }}
{{- else }}
{{- range $role, $fleet := $fleets }}
{{- $pod := include "baton.podSettings" (dict "root" $ "kind" $role) | fromYaml }}
{{- $ranks := int ($pod.ranksPerPod | default (min (int $fleet.size) (int $.Values.gpusPerNode))) }}
{{- $replicas := int (ceil (divf $fleet.workers $ranks)) }}
{{- $least := int (ceil (divf $fleet.least $ranks)) }}
{{- $most := int (ceil (divf $fleet.most $ranks)) }}
{{- $shares = append $shares (dict "name" $role "replicas" $replicas "least" $least "most" $most "slots" (dict $role $ranks) "pod" $pod) }}
{{- end }}
{{- end }}
{{- range $group := $shares }}
{{- $resources := dict }}
{{- $gpus := 0.0 }}
{{- $cpus := 0.0 }}
{{- range $role, $slots := $group.slots }}
{{- $fleet := index $fleets $role }}
{{- $_ := set $resources (printf "baton_%s" $role) $slots }}
{{- $gpus = addf $gpus (mulf $slots $fleet.gpus) }}
{{- $cpus = addf $cpus (mulf $slots (addf $fleet.cpus 0.1)) }}
{{- end }}
{{- range $role, $slots := $group.slots }}
{{- $tp := int (index $fleets $role).tp }}
{{- if and (ne $mode "internal") (gt $tp (int $slots)) }}
{{- fail (printf "fleets.%s: tensor_parallel_size is %d and a pod has %d of its ranks, so some pods would be without a gateway: load_balancing must be internal, or pods.%s.ranksPerPod larger" $role $tp $slots $role) }}
{{- end }}
{{- end }}
{{- $gateways := include "baton.gatewaysOf" (dict "slots" $group.slots "fleets" $fleets "mode" $mode) | int }}
{{- $groups = append $groups (merge (dict "resources" $resources "cpus" (add 1 (int (ceil $cpus))) "gpus" (int (ceil $gpus)) "gateways" $gateways) $group) }}
{{- end }}
{{- toYaml (dict "groups" $groups) }}
{{- end }}

{{/* The most gateways that any pod has: as many ports do gateways use. */}}
{{- define "baton.numPorts" -}}
{{- $most := 1 }}
{{- range (include "baton.groups" . | fromYaml).groups }}{{ $most = max $most (int .gateways) }}{{ end }}
{{- $most }}
{{- end }}

{{/* Pods with gateways, at most. */}}
{{- define "baton.numGatewayPods" -}}
{{- $pods := 0 }}
{{- range (include "baton.groups" . | fromYaml).groups }}
{{- if .gateways }}{{ $pods = add $pods (max (int .replicas) (int (.pod.maxReplicas | default 0))) }}{{ end }}
{{- end }}
{{- $pods }}
{{- end }}

{{/* How long what is in a pod may take to go: groups of engines as long as they may drain, and 30 s for their ends. */}}
{{- define "baton.groupSeconds" -}}
{{- $seconds := 30 }}
{{- $fleets := include "baton.fleets" .root | fromYaml }}
{{- range $role, $ranks := .slots }}
{{- $drain := (index $fleets $role).fleet.drain_timeout_s }}
{{- $seconds = max $seconds (ceil (addf 30 (ternary 30.0 $drain (kindIs "invalid" $drain))) | int) }}
{{- end }}
{{- $seconds }}
{{- end }}

{{/* What gateways take to say that they end, and what open answers get. */}}
{{- define "baton.drainSeconds" -}}
{{- ceil (addf (ternary 5.0 .Values.gateway.drain_s (kindIs "invalid" .Values.gateway.drain_s)) (.Values.gateway.drain_timeout_s | default 30.0)) | int }}
{{- end }}
