{{/* Names, labels, and the parts that all programs have in common. */}}

{{- define "quotagate.name" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The labels that select the pods of a component: (dict "root" $ "component" "api"). Never changed, as selectors are immutable. */}}
{{- define "quotagate.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Without the chart's version, so that a new chart version alone restarts no pod. */}}
{{- define "quotagate.podLabels" -}}
{{ include "quotagate.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- end -}}

{{- define "quotagate.labels" -}}
{{ include "quotagate.podLabels" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* An image by name: (dict "root" $ "image" .Values.image). */}}
{{- define "quotagate.image" -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- with .image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{- define "quotagate.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "quotagate.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* Whether the log is in a volume: "true", or nothing. */}}
{{- define "quotagate.hasClaim" -}}
{{- if and (ne .Values.log.level "off") (not .Values.log.url) }}true{{ end -}}
{{- end -}}

{{- define "quotagate.claim" -}}
{{- .Values.log.claim.existing | default (printf "%s-log" (include "quotagate.name" .)) -}}
{{- end -}}

{{- define "quotagate.scheme" -}}
{{- if .Values.tls.secretName }}HTTPS{{ else }}HTTP{{ end -}}
{{- end -}}

{{/* The settings of each pod: no token, no root, and no variables of services. A service named `quotagate` would set
     QUOTAGATE_PORT to tcp://..., which is a setting of ours. */}}
{{- define "quotagate.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "quotagate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The settings of each program. */}}
{{- define "quotagate.env" -}}
{{- range $variable, $key := dict "QUOTAGATE_REDIS_URL" .Values.secret.keys.redisUrl "QUOTAGATE_DATABASE_URL" .Values.secret.keys.databaseUrl "QUOTAGATE_ADMIN_KEY" .Values.secret.keys.adminKey "QUOTAGATE_HASH_SECRET" .Values.secret.keys.hashSecret }}
- name: {{ $variable }}
  valueFrom: {secretKeyRef: {name: {{ $.Values.secret.name | quote }}, key: {{ $key | quote }}}}
{{- end }}
- {name: QUOTAGATE_LOG, value: {{ .Values.log.level | quote }}}
{{- if ne .Values.log.level "off" }}
- {name: QUOTAGATE_LOG_URL, value: {{ .Values.log.url | default "/var/log/quotagate/log" | quote }}}
{{- with .Values.log.maxBytes }}
- {name: QUOTAGATE_LOG_MAX_BYTES, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: QUOTAGATE_TLS_CERT, value: /etc/quotagate/tls/tls.crt}
- {name: QUOTAGATE_TLS_KEY, value: /etc/quotagate/tls/tls.key}
{{- end }}
{{- range $variable, $value := .Values.config }}
- {name: {{ $variable }}, value: {{ $value | quote }}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Folders: only /tmp can be written to, and in workers and the audit the log's volume. Settings are checked whole, so
     every program needs the files that they name. */}}
{{- define "quotagate.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/quotagate/tls, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "scratch" "256Mi") */}}
{{- define "quotagate.volumes" -}}
- {name: tmp, emptyDir: {sizeLimit: {{ .scratch }}}}
{{- if .root.Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ .root.Values.tls.secretName | quote }}, defaultMode: 0440}
{{- end }}
{{- with .root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where pods of a component may run: nodeSelector, tolerations, priorityClassName. */}}
{{- define "quotagate.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}
