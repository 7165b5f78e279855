{{- define "rollwire.name" -}}
{{- if contains "rollwire" .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-rollwire" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "rollwire.selector" -}}
app.kubernetes.io/name: rollwire
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "rollwire.labels" -}}
{{ include "rollwire.selector" . }}
app.kubernetes.io/component: {{ .Values.frozen | ternary "judge" "policy" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* Another name: the servers' selectors must not find gateways. */}}
{{- define "rollwire.gatewaySelector" -}}
app.kubernetes.io/name: rollwire-gateway
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "rollwire.gatewayLabels" -}}
{{ include "rollwire.gatewaySelector" . }}
app.kubernetes.io/component: gateway
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* The secrets of a gateway: what it shows to the servers, and what it asks of its clients. */}}
{{- define "rollwire.gatewaySecrets" -}}
{{- with .Values.tls.secret }}
- {name: fleet-tls, secret: {{ . | quote }}}
{{- end }}
{{- with .Values.tokens.secret }}
- {name: fleet-tokens, secret: {{ . | quote }}}
{{- end }}
{{- with .Values.gateway.tls.secret }}
- {name: gateway-tls, secret: {{ . | quote }}}
{{- end }}
{{- with .Values.gateway.tokens.secret }}
- {name: gateway-tokens, secret: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "rollwire.gatewayArgs" -}}
{{- $gateway := .Values.gateway }}
{{- if .Values.tls.secret }}
- --tls-ca=/etc/rollwire/fleet-tls/ca.crt
{{- if .Values.tls.mutual }}
- --tls-cert=/etc/rollwire/fleet-tls/tls.crt
- --tls-key=/etc/rollwire/fleet-tls/tls.key
{{- end }}
{{- end }}
{{- if .Values.tokens.secret }}
- --token-file=/etc/rollwire/fleet-tokens/{{ $gateway.checkpointVolume | empty | ternary "rollout" "control" }}
{{- end }}
- gateway
- dns:///{{ include "rollwire.name" . }}.{{ .Release.Namespace }}.svc:{{ include "rollwire.port.api" . }}
- --listen=0.0.0.0:{{ include "rollwire.port.http" . }}
- --metrics-listen=0.0.0.0:{{ include "rollwire.port.metrics" . }}
{{- with $gateway.tokenizer | default (hasPrefix "/" .Values.model | ternary .Values.model "") }}
- {{ printf "--tokenizer=%s" . | quote }}
{{- end }}
{{- with $gateway.modelName }}
- {{ printf "--model-name=%s" . | quote }}
{{- end }}
{{- if $gateway.checkpointVolume }}
- --checkpoints=/checkpoints
{{- end }}
- --drain-seconds={{ include "rollwire.text" $gateway.drainSeconds }}
{{- if $gateway.tls.secret }}
- --listen-cert=/etc/rollwire/gateway-tls/tls.crt
- --listen-key=/etc/rollwire/gateway-tls/tls.key
{{- end }}
{{- if $gateway.tokens.secret }}
- --rollout-token-file=/etc/rollwire/gateway-tokens/rollout
- --control-token-file=/etc/rollwire/gateway-tokens/control
{{- end }}
{{- range $name, $value := $gateway.flags }}
- {{ include "rollwire.flag" (dict "name" $name "value" $value) | quote }}
{{- end }}
{{- end }}

{{- define "rollwire.port.api" -}}50051{{- end }}
{{- define "rollwire.port.http" -}}8000{{- end }}
{{- define "rollwire.port.health" -}}50052{{- end }}
{{- define "rollwire.port.metrics" -}}9464{{- end }}

{{- /* FIRST-LAST; none for judges, which take no weights. */}}
{{- define "rollwire.transportPorts" -}}
{{ .Values.frozen | ternary "" .Values.transport.ports }}
{{- end }}

{{- /* A NetworkPolicyPort of FIRST-LAST; of all ports where that is empty. */}}
{{- define "rollwire.transportDoor" -}}
- protocol: TCP
  {{- with . }}
  port: {{ splitList "-" . | first }}
  endPort: {{ splitList "-" . | last }}
  {{- end }}
{{- end }}

{{- /* All that has to do with going down follows from drainSeconds. */}}
{{- define "rollwire.preStopSeconds" -}}5{{- end }}
{{- define "rollwire.graceSeconds" -}}
{{- /* 30: the last messages, and releasing the GPU. */ -}}
{{ add (.Values.drainSeconds | ceil | int) (include "rollwire.preStopSeconds" .) 30 }}
{{- end }}

{{- /* A value as the server reads it: large numbers in full. */}}
{{- define "rollwire.text" -}}
{{ kindIs "string" . | ternary . (toJson .) }}
{{- end }}

{{- define "rollwire.flag" -}}
{{- if kindIs "bool" .value -}}
--{{ .value | ternary "" "no-" }}{{ .name }}
{{- else -}}
--{{ .name }}={{ include "rollwire.text" .value }}
{{- end -}}
{{- end }}

{{- define "rollwire.args" -}}
- {{ printf "--model=%s" .Values.model | quote }}
- --engine={{ .Values.engine }}
{{- range $name, $value := .Values.engineArgs }}
- {{ printf "--engine-arg=%s=%s" $name (include "rollwire.text" $value) | quote }}
{{- end }}
- --listen=0.0.0.0:{{ include "rollwire.port.api" . }}
- --health-listen=0.0.0.0:{{ include "rollwire.port.health" . }}
- --metrics-listen=0.0.0.0:{{ include "rollwire.port.metrics" . }}
{{- with include "rollwire.transportPorts" . }}
- --transport-listen=0.0.0.0:{{ . }}
{{- end }}
- --drain-seconds={{ include "rollwire.text" .Values.drainSeconds }}
{{- if .Values.frozen }}
- --frozen
{{- else if .Values.awaitWeights }}
- --await-weights
{{- end }}
{{- if .Values.tls.secret }}
- --tls-cert=/etc/rollwire/tls/tls.crt
- --tls-key=/etc/rollwire/tls/tls.key
{{- if .Values.tls.mutual }}
- --tls-client-ca=/etc/rollwire/tls/ca.crt
{{- end }}
{{- end }}
{{- if .Values.tokens.secret }}
- --rollout-token-file=/etc/rollwire/tokens/rollout
- --control-token-file=/etc/rollwire/tokens/control
{{- end }}
{{- range $name, $value := .Values.flags }}
- {{ include "rollwire.flag" (dict "name" $name "value" $value) | quote }}
{{- end }}
{{- end }}

{{- /* What no single value shows to be wrong. */}}
{{- define "rollwire.check" -}}
{{- $name := include "rollwire.name" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "the release would be the Service %s, and the name of one begins with a letter and has no dots" $name) }}
{{- end }}
{{- if and .Values.tokens.secret (not .Values.tls.secret) }}
{{- fail "tokens.secret needs tls.secret: the server refuses tokens that travel in the clear" }}
{{- end }}
{{- if and .Values.tls.mutual (not .Values.tls.secret) }}
{{- fail "tls.mutual needs tls.secret" }}
{{- end }}
{{- if and .Values.gateway.enabled .Values.gateway.tokens.secret (not .Values.gateway.tls.secret) }}
{{- fail "gateway.tokens.secret needs gateway.tls.secret: the gateway refuses tokens that travel in the clear" }}
{{- end }}
{{- with include "rollwire.transportPorts" . }}
{{- $first := splitList "-" . | first | int }}
{{- $last := splitList "-" . | last | int }}
{{- if or (lt (sub $last $first) 15) (gt $last 65535) }}
{{- fail (printf "transport.ports is %s: name at least 16 ports, the lowest first, none above 65535" .) }}
{{- end }}
{{- range $name := list "api" "health" "metrics" }}
{{- $own := include (printf "rollwire.port.%s" $name) $ | int }}
{{- if and (le $first $own) (le $own $last) }}
{{- fail (printf "transport.ports has the port %d, which is that of %s" $own $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (hasPrefix "/models" .Values.model) (not .Values.modelVolume) }}
{{- fail (printf "model %s lies under /models: name the volume that holds it as modelVolume" .Values.model) }}
{{- end }}
{{- end }}
