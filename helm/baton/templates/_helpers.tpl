{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Short: KubeRay appends to it, and names of Services end at 63 characters. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "baton.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "baton.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: {{ include "baton.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "baton.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* The Secret with clients' keys; empty where everyone may call. */}}
{{- define "baton.apiKeysSecret" -}}
{{- if .Values.apiKeys.existingSecret }}
{{- .Values.apiKeys.existingSecret }}
{{- else if .Values.gateway.api_keys }}
{{- printf "%s-api-keys" (include "baton.fullname" .) }}
{{- end }}
{{- end }}

{{/* Of pods of one kind: its own settings over those of all. */}}
{{- define "baton.podSettings" -}}
{{- $own := index .root.Values.pods .kind | default dict }}
{{- toYaml (mergeOverwrite (deepCopy .root.Values.pods.defaults) (deepCopy $own)) }}
{{- end }}

{{/* A file of configs/ that the chart links to. Helm follows links, also into packages; a checkout without them has a
line of text there, the link's target. */}}
{{- define "baton.linkedFile" -}}
{{- $root := index . 0 -}}
{{- $path := index . 1 -}}
{{- $text := $root.Files.Get $path -}}
{{- if not (contains "\n" $text) -}}
{{- fail (printf "%s is a symbolic link that this checkout has as text (%s): run `git config core.symlinks true && git checkout -- helm`, or copy the file there" $path $text) -}}
{{- end -}}
{{- $text -}}
{{- end }}
