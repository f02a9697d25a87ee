{{/* The labels of an object. */}}
{{- define "vm-operator.labels" -}}
app.kubernetes.io/name: vm-operator
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The labels of an object of the device plugin. */}}
{{- define "vm-operator.pluginLabels" -}}
app.kubernetes.io/name: vm-node-devices
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The reference of the manager's image. */}}
{{- define "vm-operator.image" -}}
{{- with .Values.image -}}
{{ .registry }}/{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/* The reference of the runner's image, for the trial of KVM. */}}
{{- define "vm-operator.runnerImage" -}}
{{ .Values.nodeDevices.runnerImage | default .Values.runner.image | default (printf "%s/vm-runner:%s" .Values.image.registry .Chart.AppVersion) }}
{{- end }}

{{/* The namespaces whose Pods run VMs, with commas. */}}
{{- define "vm-operator.vmNamespaces" -}}
{{ .Values.rbac.namespaces | default (list .Release.Namespace) | uniq | join "," }}
{{- end }}

{{/* The section `/Reconciler` of the configuration; what the values say of it comes first. */}}
{{- define "vm-operator.reconciler" -}}
{{- $config := dict }}
{{- with .Values.runner.image }}{{ $_ := set $config "runnerImage" . }}{{ end }}
{{- with .Values.runner.pullPolicy }}{{ $_ := set $config "runnerImagePullPolicy" . }}{{ end }}
{{- if .Values.nodeDevices.enabled }}{{ $_ := set $config "nodeDevices" (dict "machine" "vmoperator.jdrupes.org/machine") }}{{ end }}
{{- $config = mergeOverwrite $config (deepCopy .Values.config) }}
{{- with $config }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* Texts with `*` and `?` as a list of regular expressions in CEL. */}}
{{- define "vm-operator.patterns" -}}
{{- $patterns := list }}
{{- range . }}{{ $patterns = append $patterns (printf "r'^%s$'" (include "vm-operator.pattern" .)) }}{{ end -}}
[{{ join ", " $patterns }}]
{{- end }}

{{/* Repositories of images, in any tag and digest, as a list of regular expressions in CEL. */}}
{{- define "vm-operator.imagePatterns" -}}
{{- $patterns := list }}
{{- range . }}{{ $patterns = append $patterns (printf "r'^%s(:[^/]*)?(@.*)?$'" (include "vm-operator.pattern" .)) }}{{ end -}}
[{{ join ", " $patterns }}]
{{- end }}

{{/* URLs as a list of regular expressions in CEL: `*` is any text in the path, and names at the beginning of a host. */}}
{{- define "vm-operator.urlPatterns" -}}
{{- $patterns := list }}
{{- range . }}
{{- if eq . "*" }}{{ $patterns = append $patterns "r'^.*$'" }}
{{- else }}
{{- $parts := splitn "/" 4 . }}
{{- $host := regexQuoteMeta (trimPrefix "*." $parts._2) }}
{{- if hasPrefix "*." $parts._2 }}{{ $host = printf "([^/@#?:]+[.])%s" $host }}{{ end }}
{{- $patterns = append $patterns (printf "r'^%s//%s/%s$'" $parts._0 $host (include "vm-operator.pattern" $parts._3)) }}
{{- end }}
{{- end -}}
[{{ join ", " $patterns }}]
{{- end }}

{{/* A text with `*` and `?` as a regular expression. */}}
{{- define "vm-operator.pattern" -}}
{{ regexQuoteMeta . | replace "\\*" ".*" | replace "\\?" "." | replace "'" "." }}
{{- end }}

{{/* Ports and ranges of them as a list of pairs in CEL, with those that need no permission. */}}
{{- define "vm-operator.ports" -}}
{{- $ranges := list "[5800, 5999]" }}
{{- range . }}
{{- $ends := splitList "-" (toString .) }}
{{- $ranges = append $ranges (printf "[%s, %s]" (first $ends) (last $ends)) }}
{{- end -}}
[{{ join ", " $ranges }}]
{{- end }}

{{/* What the manager must be able to do in a namespace with VMs. */}}
{{- define "vm-operator.vmRules" -}}
- apiGroups: [vmoperator.jdrupes.org]
  resources: [vms, vmpools]
  verbs: [get, list, watch]
- apiGroups: [vmoperator.jdrupes.org]
  resources: [vms/status, vmpools/status]
  verbs: [patch]
# What the runner in a Pod reports of its VM: the manager makes one object for each Pod, and puts what is in it in the status of the VM.
- apiGroups: [vmoperator.jdrupes.org]
  resources: [vmreports]
  verbs: [get, list, watch, create, patch, delete]
# The manager patches the field `state`: when a guest shut itself down and must stay down, and nobody applies that field, and for pools. It makes,
# changes and deletes the VMs of pools with a `template`, and no others; without such pools it needs only `patch`. It sends no `update`: the policy
# in deploy/users asks whoever changes more of a VM than its power for that right.
- apiGroups: [vmoperator.jdrupes.org]
  resources: [vms]
  verbs: [create, patch, update, delete]
# `blockOwnerDeletion` in a Pod's owner, which makes `kubectl delete --cascade=foreground` wait for the guest. Only the admission plugin
# OwnerReferencesPermissionEnforcement asks for this right.
- apiGroups: [vmoperator.jdrupes.org]
  resources: [vms/finalizers]
  verbs: [update]
# The kinds that the built-in templates create. If your templates create other kinds, add the same verbs for them.
- apiGroups: [""]
  resources: [configmaps, pods, secrets, services]
  verbs: [get, list, watch, create, patch, delete]
# No verb `delete`: claims are the disks of VMs, and the manager never deletes them.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
# VM-Operator releases before 3.4 created a StatefulSet for each VM. It would make a VM's Pod again, so the manager watches and deletes
# it; its claims stay.
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, delete]
# What made a Pod that runs a guest, if your templates or a person make it otherwise.
- apiGroups: [apps]
  resources: [deployments, replicasets]
  verbs: [get]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
# Why a VM does not start, for the condition Ready: the kubelet and provisioners say it in events alone.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
{{- with .Values.rbac.extraRules }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What the manager must be able to do with its Lease, in its own namespace. */}}
{{- define "vm-operator.leaseRules" -}}
# The leader election between managers. A rule for `create` can't be restricted to a name.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [vm-operator]
  verbs: [get, list, watch, update]
{{- end }}

{{/* What the manager must be able to do with template sets in its own namespace, if it manages no VMs there. */}}
{{- define "vm-operator.templateRules" -}}
# Template sets, and which of them are in force.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}

{{/* What the web interface must be able to do in a namespace with VMs. */}}
{{- define "vm-operator.webRules" -}}
# Whoever may change a VM in the web interface is decided there: its account changes all of them. With `patch` alone a policy would let it change
# no more than their power.
- apiGroups: [vmoperator.jdrupes.org]
  resources: [vms]
  verbs: [get, list, watch, patch, update{{ if .Values.web.createVms }}, create{{ end }}]
- apiGroups: [vmoperator.jdrupes.org]
  resources: [vmpools]
  verbs: [list, watch]
# To whom a VM of a pool is assigned, and whom a connection file is for.
- apiGroups: [vmoperator.jdrupes.org]
  resources: [vms/status]
  verbs: [patch]
# Why a VM is not as its spec wants it.
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [list]
# The certificate and the token of a VM's relay, in the Secret NAME-relay, and the password of its display, which a connection file may replace. A rule can't
# name a pattern.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, patch]
# The address of a VM's load balancer.
- apiGroups: [""]
  resources: [services]
  verbs: [get]
# What people did to a VM.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{/* What the web interface mounts beside its configuration, in its own Pod or in the manager's. */}}
{{- define "vm-operator.webMounts" -}}
{{- if .Values.web.sessionKeySecret }}
- name: session
  mountPath: /etc/vm-operator/session
  readOnly: true
{{- end }}
{{- if .Values.web.tlsSecret }}
- name: tls
  mountPath: /etc/vm-operator/tls
  readOnly: true
{{- end }}
{{- if .Values.web.caSecret }}
- name: ca
  mountPath: /etc/vm-operator/ca
  readOnly: true
{{- end }}
{{- end }}

{{/* Where these come from. */}}
{{- define "vm-operator.webVolumes" -}}
{{- with .Values.web.sessionKeySecret }}
- name: session
  secret:
    secretName: {{ . }}
{{- end }}
{{- with .Values.web.tlsSecret }}
- name: tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- with .Values.web.caSecret }}
- name: ca
  secret:
    secretName: {{ . }}
{{- end }}
{{- end }}

{{/* Its configuration. */}}
{{- define "vm-operator.webConfig" -}}
{{- if .Values.web.configSecret -}}
secret:
  secretName: {{ .Values.web.configSecret }}
{{- else -}}
{{- /* The Secret's file takes the place of the manager's: what comes later in a projected volume does. */ -}}
projected:
  sources:
    - configMap:
        name: vm-operator
        optional: true
    - secret:
        name: vm-operator-web
        optional: true
{{- end }}
{{- end }}
