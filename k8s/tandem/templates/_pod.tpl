{{/* What all pods have alike. */}}

{{/* The root, with `asks` where the pod asks the API server: then it has an account of its own. */}}
{{- define "tandem.podSecurity" -}}
serviceAccountName: {{ include "tandem.fullname" . }}{{ if .asks }}-planner{{ end }}
automountServiceAccountToken: {{ .asks | default false }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tandem.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  privileged: false
  capabilities: {drop: [ALL]}
{{- end -}}

{{/*
grpc.health.v1: serving is registered and warmed up and, later, that steps progress. `startupSeconds`: of loading.
The kubelet has no certificate: with TLS the container asks itself, which costs the start of a process each time.
*/}}
{{- define "tandem.rpcProbes" -}}
{{- $tls := .root.Values.tls.existingSecret -}}
{{- $ask := printf "grpc: {port: %s}" (include "tandem.rpcPort" .) -}}
{{- if $tls }}{{ $ask = "exec: {command: [tandem, probe]}" }}{{ end -}}
startupProbe:
  {{ $ask }}
  periodSeconds: 5
  timeoutSeconds: {{ ternary 10 3 (ne $tls "") }}
  failureThreshold: {{ max 1 (div (int .startupSeconds) 5) }}
readinessProbe:
  {{ $ask }}
  periodSeconds: {{ ternary 15 5 (ne $tls "") }}
  timeoutSeconds: {{ ternary 10 3 (ne $tls "") }}
  failureThreshold: 2
livenessProbe:
  {{ $ask }}
  periodSeconds: {{ ternary 30 10 (ne $tls "") }}
  timeoutSeconds: {{ ternary 10 5 (ne $tls "") }}
  failureThreshold: 3
{{- end -}}

{{- define "tandem.tlsMount" -}}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/tandem-tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Processes take it anew when the Secret changes. */}}
{{- define "tandem.tlsVolume" -}}
{{- with .Values.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "component" NAME "pool" NAME "antiAffinity" HOW "topologySpreadConstraints" LIST) */}}
{{- define "tandem.spread" -}}
topologySpreadConstraints:
{{- with .topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tandem.selector" . | nindent 8 }}
{{- end }}
{{- if eq .antiAffinity "required" }}
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "tandem.selector" . | nindent 12 }}
{{- else if eq .antiAffinity "preferred" }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "tandem.selector" . | nindent 14 }}
{{- end }}
{{- end -}}

{{- define "tandem.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tandem.modelMount" -}}
{{- if .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tandem.modelVolume" -}}
{{- with .Values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
