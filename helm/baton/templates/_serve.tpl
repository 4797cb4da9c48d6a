{{/*
The application: `args` are the values' own, with keys taken out and places of ranks put in. What running gateways
follow, and targets of the autoscaler, are in `deployments`: a change there restarts no engine.
*/}}
{{- define "baton.application" -}}
{{- $fleets := include "baton.fleets" . | fromYaml }}
{{- $gateway := omit (deepCopy .Values.gateway) "api_keys" }}
{{- if include "baton.apiKeysSecret" . }}
{{- $_ := set $gateway "api_keys_file" (printf "/etc/baton/%s" .Values.apiKeys.key) }}
{{- end }}
{{- if eq .Values.load_balancing "internal" }}
{{- $gateway = merge $gateway (dict "num_cpus" 0 "resources" (dict "baton_gateway" 1) "max_surge_percent" 0) }}
{{- else if $gateway.replicas }}
{{- fail (printf "gateway.replicas: load_balancing is %s, so there is one a %s; leave it out" .Values.load_balancing (ternary "pod" "rank" (eq .Values.load_balancing "hybrid"))) }}
{{- end }}
{{- $described := dict }}
{{- range $role, $fleet := $fleets }}
{{- $resources := merge (dict (printf "baton_%s" $role) 1) ($fleet.fleet.resources | default dict) }}
{{- $_ := set $described $role (mergeOverwrite (deepCopy $fleet.fleet) (dict "num_gpus" $fleet.gpus "resources" $resources)) }}
{{- end }}
{{- $kept := pick $gateway "host" "port" "num_cpus" "resources" "max_surge_percent" "engine_heartbeat_timeout_s" }}
{{- $userConfig := dict "gateway" (omit $gateway "host" "port" "num_cpus" "resources" "max_surge_percent" "engine_heartbeat_timeout_s" "replicas") }}
{{- $deployment := dict "name" "gateway" "user_config" $userConfig }}
{{- if hasKey $gateway "replicas" }}{{ $_ := set $deployment "num_replicas" $gateway.replicas }}{{ end }}
{{- $args := dict "model" .Values.model "load_balancing" .Values.load_balancing "gateway" $kept "engine" .Values.engine "fleets" $described "transfer" .Values.transfer }}
{{- $scaled := dict }}
{{- range $role, $fleet := $fleets }}{{ if hasKey $fleet.fleet "max_replicas" }}{{ $_ := set $scaled $role true }}{{ end }}{{ end }}
{{- if $scaled }}
{{- $_ := set $args "autoscaling" dict }}
{{- $_ := set $userConfig "autoscaling" (omit .Values.autoscaling "enabled" "version" "upscalingMode" "idleTimeoutSeconds" "resources") }}
{{- end }}
{{- with .Values.logging }}{{ $_ := set $args "logging" . }}{{ end }}
{{- if .Values.revision }}{{ $_ := set $args "revision" .Values.revision }}{{ end }}
{{- if .Values.model_id }}{{ $_ := set $args "model_id" .Values.model_id }}{{ end }}
{{- toYaml (dict "args" $args "deployments" (list $deployment)) }}
{{- end }}

{{- define "baton.serveConfig" -}}
proxy_location: Disabled
applications:
  - name: baton
    route_prefix: /
    import_path: baton.cluster.app:build_app
    {{- include "baton.application" . | nindent 4 }}
{{- end }}
