{{/* Names and labels. Parts are called with (dict "root" $ "component" NAME "pool" NAME-OR-EMPTY). */}}

{{- define "tandem.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-tandem" .Release.Name) (contains "tandem" .Release.Name) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tandem.secret" -}}
{{- .Values.secrets.existingSecret | default (include "tandem.fullname" .) -}}
{{- end -}}

{{/* What tells the release's pods from all others. */}}
{{- define "tandem.release" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "tandem.selector" -}}
{{ include "tandem.release" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
tandem/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* (dict "root" $ "image" KEY-OF-images) */}}
{{- define "tandem.image" -}}
{{- $image := index .root.Values.images .image -}}
image: {{ printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}
