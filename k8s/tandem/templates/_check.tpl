{{/* What the schema cannot say: values that fit one by one but not together. */}}
{{- define "tandem.check" -}}
{{- $decoding := 0 -}}
{{- range $name, $own := .Values.pools -}}
{{- if has $own.role (list "decode" "aggregated") }}{{ $decoding = add $decoding $own.replicas }}{{ end -}}
{{- if has $name (list "gateway" "router" "kv" "redis" "planner") -}}
{{- fail (printf "pools: a pool cannot be named %q, as another part has that name" $name) -}}
{{- end -}}
{{- end -}}
{{- if eq (int $decoding) 0 -}}
{{- fail "pools: nobody would decode: give one pool the role decode or aggregated, and at least one replica" -}}
{{- end -}}
{{- if and .Values.planner.enabled (eq .Values.planner.mode "act") -}}
{{- $scaled := dict -}}
{{- range $name, $own := .Values.pools -}}
{{- $key := printf "%s %s" (dig "model" "name" "" $own) $own.role -}}
{{- if hasKey $scaled $key -}}
{{- fail (printf "planner.mode act scales one pool of each role and model, and both %s and %s are %s" (get $scaled $key) $name $own.role) -}}
{{- end -}}
{{- $_ := set $scaled $key $name -}}
{{- end -}}
{{- end -}}
{{- if not (or .Values.redis.enabled .Values.state.url .Values.secrets.existingSecret) -}}
{{- fail "redis.enabled is false, so give state.url=redis://..., or secrets.existingSecret with the key `state`" -}}
{{- end -}}
{{- if and .Values.redis.enabled .Values.state.url -}}
{{- fail "state.url names a server of yours, so set redis.enabled=false" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.enabled) -}}
{{- fail "metrics.serviceMonitor.enabled needs metrics.enabled=true" -}}
{{- end -}}
{{- if and .Values.secrets.keysFile.enabled (not .Values.secrets.existingSecret) (not .Values.secrets.keysFile.content) -}}
{{- fail "secrets.keysFile.enabled needs its content: --set-file secrets.keysFile.content=keys.toml" -}}
{{- end -}}
{{- if and .Values.secrets.existingSecret (or .Values.secrets.keysFile.content .Values.secrets.clusterKey .Values.secrets.adminKey .Values.secrets.apiKeys .Values.state.url) -}}
{{- fail "secrets.existingSecret holds all keys and the state's URL: give none of them as values beside it" -}}
{{- end -}}
{{- end -}}
