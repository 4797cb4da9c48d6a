{{/* The arguments of the application: the values' own, with keys taken out and places of ranks put in. */}}
{{- define "baton.args" -}}
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
{{- $args := dict "model" .Values.model "load_balancing" .Values.load_balancing "gateway" $gateway "engine" .Values.engine "fleets" $described "transfer" .Values.transfer }}
{{- $scaled := dict }}
{{- range $role, $fleet := $fleets }}{{ if hasKey $fleet.fleet "max_replicas" }}{{ $_ := set $scaled $role true }}{{ end }}{{ end }}
{{- if $scaled }}
{{- $_ := set $args "autoscaling" (omit .Values.autoscaling "enabled" "version" "upscalingMode" "idleTimeoutSeconds" "resources") }}
{{- end }}
{{- with .Values.logging }}{{ $_ := set $args "logging" . }}{{ end }}
{{- if .Values.model_id }}{{ $_ := set $args "model_id" .Values.model_id }}{{ end }}
{{- toYaml $args }}
{{- end }}

{{- define "baton.serveConfig" -}}
proxy_location: Disabled
applications:
  - name: baton
    route_prefix: /
    import_path: baton.cluster.app:build_app
    args:
      {{- include "baton.args" . | nindent 6 }}
{{- end }}
