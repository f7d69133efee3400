{{/* Every environment variable that the chart sets. Settings are those of services/config.py, as TANDEM_NAME. */}}

{{/* One port for gRPC everywhere, so that probes find it. */}}
{{- define "tandem.rpcPort" -}}7000{{- end -}}

{{/* A setting's value as text: numbers of YAML are floats here, and 1e+06 is none that a setting takes. */}}
{{- define "tandem.scalar" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* (dict "root" $ "settings" MAP): what every process has, then its own settings. */}}
{{- define "tandem.environment" -}}
- name: TANDEM_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
# Others call this process at its pod's address; the cluster key is what lets it bind there.
- name: TANDEM_BIND
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: TANDEM_RPC_PORT
  value: {{ include "tandem.rpcPort" . | quote }}
- name: TANDEM_CLUSTER_KEY
  valueFrom: {secretKeyRef: {name: {{ include "tandem.secret" .root }}, key: cluster-key}}
{{- if .root.Values.tls.existingSecret }}
- name: TANDEM_TLS_CERTIFICATE
  value: /etc/tandem-tls/tls.crt
- name: TANDEM_TLS_KEY
  value: /etc/tandem-tls/tls.key
- name: TANDEM_TLS_CA
  value: /etc/tandem-tls/ca.crt
- name: TANDEM_TLS_NAME
  value: {{ .root.Values.tls.name | quote }}
{{- end }}
{{- if .root.Values.redis.enabled }}
{{ include "tandem.redisPassword" .root }}
- name: TANDEM_STATE
  value: redis://:$(REDIS_PASSWORD)@{{ include "tandem.fullname" .root }}-redis:6379/0
{{- else }}
- name: TANDEM_STATE
  valueFrom: {secretKeyRef: {name: {{ include "tandem.secret" .root }}, key: state}}
{{- end }}
{{- range $name, $value := mergeOverwrite (deepCopy .root.Values.settings) .settings }}
- name: TANDEM_{{ upper $name }}
  value: {{ include "tandem.scalar" $value | quote }}
{{- end }}
{{- end -}}

{{- define "tandem.redisPassword" -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "tandem.secret" . }}, key: redis-password}}
{{- end -}}

{{- define "tandem.apiKeys" -}}
- name: TANDEM_API_KEYS
  valueFrom: {secretKeyRef: {name: {{ include "tandem.secret" . }}, key: api-keys}}
{{- end -}}

{{/* A model: {path, name}. */}}
{{- define "tandem.modelEnvironment" -}}
- name: TANDEM_MODEL
  value: {{ .path | quote }}
{{- with .name }}
- name: TANDEM_MODEL_NAME
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Models that pools have beside that of the release, as the gateway takes them. */}}
{{- define "tandem.moreModels" -}}
{{- $models := list -}}
{{- range .Values.pools }}{{ with .model }}{{ $models = append $models (printf "%s=%s" .name .path) }}{{ end }}{{ end -}}
{{- $models | uniq | sortAlpha | join "," -}}
{{- end -}}

{{- define "tandem.gatewayEnvironment" -}}
{{ include "tandem.modelEnvironment" .Values.model }}
{{- with include "tandem.moreModels" . }}
- name: TANDEM_MORE_MODELS
  value: {{ . | quote }}
{{- end }}
# In the pod's own network; the NetworkPolicy and the Service say who gets there.
- name: TANDEM_HOST
  value: 0.0.0.0
- name: TANDEM_PORT
  value: "8000"
- name: TANDEM_DRAIN_SECONDS
  value: {{ include "tandem.scalar" .Values.gateway.drainSeconds | quote }}
- name: TANDEM_ADMIN_PORT
  value: "8090"
{{- if .Values.openToAll }}
- name: TANDEM_OPEN_TO_ALL
  value: "true"
{{- else }}
{{ include "tandem.apiKeys" . }}
{{- if .Values.secrets.keysFile.enabled }}
- name: TANDEM_API_KEYS_FILE
  value: /etc/tandem/keys.toml
{{- end }}
{{- end }}
{{- if .Values.metrics.enabled }}
- name: TANDEM_ADMIN_HOST
  value: 0.0.0.0
- name: TANDEM_ADMIN_KEY
  valueFrom: {secretKeyRef: {name: {{ include "tandem.secret" . }}, key: admin-key}}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "pool" POOL) */}}
{{- define "tandem.workerEnvironment" -}}
{{ include "tandem.modelEnvironment" (.pool.model | default .root.Values.model) }}
- name: TANDEM_DRAIN_SECONDS
  value: {{ include "tandem.scalar" .pool.drainSeconds | quote }}
{{- if .pool.gpus }}
- name: TANDEM_DEVICE
  value: cuda
- name: TANDEM_TENSOR_PARALLEL
  value: {{ include "tandem.scalar" .pool.gpus | quote }}
{{- if not (or (eq .pool.role "aggregated") .pool.settings.connector) }}
# Between pods it has to be named: its sockets know no key, and here a NetworkPolicy keeps others away from them.
- name: TANDEM_CONNECTOR
  value: nccl
{{- end }}
{{- end }}
{{- end -}}

{{/* The deployments of the pools, as planner_deployments takes them. */}}
{{- define "tandem.plannerEnvironment" -}}
- name: TANDEM_PLANNER
  value: {{ .Values.planner.mode }}
{{- if .Values.planner.profile }}
- name: TANDEM_PLANNER_PROFILE
  value: /etc/tandem/profile.json
{{- end }}
{{- if eq .Values.planner.mode "act" }}
{{- $deployments := list -}}
{{- range $name, $own := .Values.pools -}}
{{- $of := "" }}{{ with $own.model }}{{ $of = printf "%s/" .name }}{{ end -}}
{{- $deployments = append $deployments (printf "%s%s=%s-%s" $of $own.role (include "tandem.fullname" $) $name) -}}
{{- end }}
- name: TANDEM_PLANNER_ACTUATOR
  value: kubernetes
- name: TANDEM_PLANNER_DEPLOYMENTS
  value: {{ join "," $deployments | quote }}
{{- end }}
{{- end -}}
