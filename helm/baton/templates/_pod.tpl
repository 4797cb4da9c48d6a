{{/*
The pod of one kind. Takes root, kind, pod (settings), slots (ranks of each role in it), gateways (how many listen in it),
gpus, and probes (YAML).
KubeRay makes the command from rayStartParams and adds its own environment, /dev/shm excepted, which is here.
*/}}
{{- define "baton.podTemplate" -}}
{{- $root := .root }}
{{- $pod := .pod }}
{{- $port := int $root.Values.gateway.port }}
{{- $keys := include "baton.apiKeysSecret" $root }}
{{- $drains := include "baton.groupSeconds" . | int }}
{{- $answers := ternary (include "baton.drainSeconds" $root | int) 0 (gt (int .gateways) 0) }}
{{- $limits := dict }}
{{- if .gpus }}{{ $_ := set $limits $root.Values.gpuResource (int .gpus) }}{{ end }}
metadata:
  labels:
    {{- include "baton.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .kind }}
    {{- if .gateways }}
    baton/gateway: "true"
    {{- end }}
    {{- with mergeOverwrite (deepCopy $root.Values.commonLabels) ($pod.labels | default dict) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pod.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "baton.serviceAccountName" $root }}
  {{- /* Ray's autoscaler runs beside the head and asks Kubernetes for pods. */}}
  automountServiceAccountToken: {{ and (eq .kind "head") $root.Values.autoscaling.enabled }}
  enableServiceLinks: false
  {{- with $root.Values.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.podSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $pod.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- range $name := list "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with index $pod $name }}
  {{ $name }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- range $name := list "nodeSelector" "tolerations" "affinity" "initContainers" }}
  {{- with index $pod $name }}
  {{ $name }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- if $pod.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml $pod.topologySpreadConstraints | nindent 4 }}
  {{- else if gt (int .replicas) 1 }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "baton.selectorLabels" $root | nindent 10 }}
          app.kubernetes.io/component: {{ .kind }}
  {{- end }}
  terminationGracePeriodSeconds: {{ $pod.terminationGracePeriodSeconds | default (add 15 $answers $drains) }}
  containers:
    - name: ray-{{ ternary "head" "worker" (eq .kind "head") }}
      image: "{{ $root.Values.image.repository }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}"
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- with $pod.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- if eq .kind "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: serve, containerPort: {{ $port }}}
        {{- end }}
        {{- range $index := until (int .gateways) }}
        - {name: {{ ternary "serve" (printf "serve-%d" $index) (eq $index 0) }}, containerPort: {{ add $port $index }}}
        {{- end }}
        - {name: metrics, containerPort: 8080}
      env:
        - {name: TRITON_CACHE_DIR, value: {{ $root.Values.cacheVolume.mountPath }}/triton}
        {{- with $root.Values.hub }}
        - {name: HF_HOME, value: {{ .cacheVolume.mountPath }}}
        {{- if .existingSecret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
        {{- end }}
        {{- with .endpoint }}
        - {name: HF_ENDPOINT, value: {{ . | quote }}}
        {{- end }}
        {{- if .offline }}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- end }}
        {{- end }}
        - {name: RAY_worker_niceness, value: "0"} # Ray's 15 lets every other process take the cores from a step
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        # After SIGTERM: Ray moves what is here, which lets groups drain, and ends as soon as nothing is left.
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ $drains | quote }}}
        {{- with $pod.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $pod.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- /* What is limited but not asked for is asked for in the same amount. */}}
        {{- toYaml (merge (dict "limits" $limits) $pod.resources) | nindent 8 }}
      {{- .probes | trim | nindent 6 }}
      {{- if .gateways }}
      lifecycle:
        preStop: # connections end with the pod: new ones go elsewhere meanwhile, open answers come to their end
          exec:
            command: [sleep, {{ $answers | quote }}]
      {{- end }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        - {name: cache, mountPath: {{ $root.Values.cacheVolume.mountPath }}}
        - {name: hub, mountPath: {{ $root.Values.hub.cacheVolume.mountPath }}}
        {{- if $root.Values.modelVolume.source }}
        - name: models
          mountPath: {{ $root.Values.modelVolume.mountPath }}
          readOnly: true
          {{- with $root.Values.modelVolume.subPath }}
          subPath: {{ . }}
          {{- end }}
        {{- end }}
        {{- if $keys }}
        - {name: api-keys, mountPath: /etc/baton, readOnly: true}
        {{- end }}
        {{- with $pod.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pod.sharedMemory }}}
    - name: cache
      {{- toYaml $root.Values.cacheVolume.source | nindent 6 }}
    - name: hub
      {{- toYaml $root.Values.hub.cacheVolume.source | nindent 6 }}
    {{- with $root.Values.modelVolume.source }}
    - name: models
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if $keys }}
    - name: api-keys
      secret:
        secretName: {{ $keys }}
        items:
          - {key: {{ $root.Values.apiKeys.key }}, path: {{ $root.Values.apiKeys.key }}}
    {{- end }}
    {{- with $pod.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/*
Probes are given in any case: KubeRay's own for a RayService's workers ask for Serve's proxy, which Baton does without.

    alive   the raylet answers; beside a gateway that has a pod to itself: and it does not hang
    ready   gateways of which a pod has one: they can serve. Else the raylet answers; of several gateways in a pod each
            is looked at by the balancer
*/}}
{{- define "baton.probes" -}}
{{- $raylet := dict "path" "/api/healthz" "port" 52365 }}
livenessProbe:
  {{- if eq .kind "gateway" }}
  exec:
    command:
      - python
      - -c
      - |
        from urllib.error import URLError
        from urllib.request import urlopen

        urlopen("http://127.0.0.1:52365/api/healthz", timeout=4)
        try:
            urlopen("http://127.0.0.1:{{ int .root.Values.gateway.port }}/live", timeout=4)
        except URLError as error:  # until Serve has put a gateway here, nobody listens
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
  {{- else }}
  httpGet: {{ toJson $raylet }}
  {{- end }}
  initialDelaySeconds: 30
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 12
readinessProbe:
  {{- if eq (int .gateways) 1 }}
  httpGet: {path: /health, port: serve}
  periodSeconds: 2
  failureThreshold: 2
  {{- else }}
  httpGet: {{ toJson $raylet }}
  periodSeconds: 5
  failureThreshold: 10
  {{- end }}
  timeoutSeconds: 5
{{- end }}
